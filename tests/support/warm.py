"""Python processes that begin with torch and the project imported.

Importing them takes a process several seconds of a core, most of what a run of a tiny model takes, and the suite starts
hundreds. So one process imports them once, and forks where a test starts a program:

    the test --starts--> `python` (this file as a script: a client) --asks--> the server --forks--> the program

The client is as cheap as an interpreter can be. It hands over its arguments, environment, limits, working folder and
standard files, passes on signals, and ends as the program ends; if it is killed, so is the program. Its name says which
process the program is ("for-1234"), since SIGSTOP cannot be passed on."""

from __future__ import annotations

import os
import signal
import socket
import sys

KEPT = "KILL STOP TSTP TTIN TTOU CHLD URG WINCH PIPE XFSZ ILL TRAP BUS FPE SEGV SYS".split()
PASSED_ON = tuple(signal.valid_signals() - {getattr(signal, f"SIG{name}") for name in KEPT})
"""All that a process may be sent to end it, and SIGCONT."""
IMPORTED = (
    "trainer.commands.train",
    "trainer.commands.sample",
    "trainer.commands.torchrun",
    "trainer.training.run",
    "trainer.parity",
    "hydra._internal.config_loader_impl",
    "torch.utils.tensorboard",
)


def client(address: str, arguments: list[str]) -> int:
    """Asks the server for a program, and ends as it does."""
    import json
    import resource

    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "parent": os.getppid(),
        "client": os.getpid(),
        "limits": limits,
        "ignored": [number for number in PASSED_ON if signal.getsignal(number) == signal.SIG_IGN],
    }
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until it is known whom they are for
        message = json.dumps(request).encode()
        socket.send_fds(server, [len(message).to_bytes(8, "big")], [0, 1, 2])
        server.sendall(message)
        program = int.from_bytes(receive(server, 8), "big")
        with open("/proc/self/comm", "w") as name:
            name.write(f"for-{program}")  # no space: Slurm reads /proc/PID/stat by spaces
        for number in PASSED_ON:
            if number not in request["ignored"]:
                signal.signal(number, lambda number, _: send(program, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        code = int.from_bytes(receive(server, 8), "big", signed=True)
    if code < 0:  # ended by a signal: so does this process
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), -code)
    return code


def send(process: int, number: int) -> None:
    try:
        os.kill(process, number)
    except ProcessLookupError:
        pass


def receive(connection: socket.socket, size: int) -> bytes:
    """Exactly so many bytes. Raises: EOFError where the other side has gone."""
    found = b""
    while len(found) < size:
        if not (more := connection.recv(size - len(found))):
            raise EOFError
        found += more
    return found


def serve(address: str) -> None:
    """Forks programs for clients, until the process that started it closes its standard input."""
    import gc
    import importlib
    import selectors
    import shutil

    del sys.path[0]  # this file's folder, which is no program's
    try:
        for name in IMPORTED:
            importlib.import_module(name)
    except BaseException:
        shutil.rmtree(os.path.dirname(address))  # who waits for the socket sees it
        raise
    gc.collect()
    gc.freeze()
    programs: dict[int, socket.socket] = {}
    ended, wake = os.pipe()
    for end in (ended, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(wake)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address + ".new")
    listener.listen(100)
    os.rename(address + ".new", address)  # whoever sees it can connect
    events = selectors.DefaultSelector()
    for source in (0, ended, listener):
        events.register(source, selectors.EVENT_READ)
    while True:
        for key, _ in events.select():
            if key.fileobj == 0:
                for program in programs:
                    send(program, signal.SIGKILL)
                return
            if key.fileobj == ended:
                os.read(ended, 4096)
            elif key.fileobj is listener:
                connection, _ = listener.accept()
                try:
                    program = fork(connection, [listener, *programs.values()], (ended, wake))
                except EOFError:  # a client that was killed at once
                    connection.close()
                    continue
                programs[program] = connection
                events.register(connection, selectors.EVENT_READ)
            else:  # a client has gone
                for program, connection in programs.items():
                    if connection is key.fileobj:
                        send(program, signal.SIGKILL)
                events.unregister(key.fileobj)
        while programs:
            program, status = os.waitpid(-1, os.WNOHANG)
            if program == 0:
                break
            connection = programs.pop(program)
            try:
                events.unregister(connection)
            except KeyError:
                pass
            try:
                connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "big", signed=True))
            except OSError:
                pass
            connection.close()


def fork(connection: socket.socket, others: list[socket.socket], pipe: tuple[int, int]) -> int:
    """In the server, the program that a client asks for; in the program: does not return."""
    import json

    size, files, _, _ = socket.recv_fds(connection, 8, 3)
    if len(size) < 8:
        raise EOFError
    request = json.loads(receive(connection, int.from_bytes(size, "big")))
    if program := os.fork():
        for file in files:
            os.close(file)
        connection.sendall(program.to_bytes(8, "big"))
        return program
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, *PASSED_ON):
        signal.signal(number, signal.SIG_DFL)
    for other in (connection, *others):
        other.close()
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)
    for end in pipe:
        os.close(end)
    become(request)


def enter(client: int) -> None:
    """The network namespace of a client that has one of its own (`ip netns exec`), with its view of /sys."""
    import ctypes

    if os.path.samefile(f"/proc/{client}/ns/net", "/proc/self/ns/net"):
        return
    files = [os.open(f"/proc/{client}/ns/{kind}", os.O_RDONLY) for kind in ("net", "mnt")]
    libc = ctypes.CDLL(None, use_errno=True)
    for file in files:
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(file)


def become(request: dict) -> None:
    """Runs the program: `-m MODULE ...`, `-c CODE ...` or `FILE ...`, with -u before it or not. Does not return."""
    import io
    import random
    import resource
    import runpy
    import warnings

    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    enter(request["client"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    for name, limit in request["limits"].items():
        resource.setrlimit(getattr(resource, name), limit)
    os.getppid = lambda: request["parent"]
    random.seed()
    arguments = [argument for argument in request["arguments"][:1] if argument != "-u"] + request["arguments"][1:]
    unbuffered = bool(request["environment"].get("PYTHONUNBUFFERED")) or len(arguments) < len(request["arguments"])
    for name, place, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        raw = open(place, mode + "b", closefd=False)
        text = io.TextIOWrapper(raw, write_through=unbuffered, line_buffering=os.isatty(place) or place == 2)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    paths = [path for path in request["environment"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [path for path in paths if path not in sys.path] + sys.path
    warnings.filterwarnings("ignore", "'.*' found in sys.modules after import of package")  # of what is run now
    code: object = 0
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = arguments
            sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as exit:
        code = exit.code
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    import atexit
    import threading

    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        # Not sys.exit: its tear-down gives signals their defaults back, and one that comes then would change the exit
        # code of a program that has ended.
        os._exit(client(sys.argv[1], sys.argv[2:]))
