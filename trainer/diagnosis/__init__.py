"""Where the time of a run goes, from what it wrote: pure functions of files. No torch, no process group."""
