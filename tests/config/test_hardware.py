"""Files of configs/hardware: legal, with known peaks, and refused with one line for each thing that is wrong."""

from __future__ import annotations

import pytest
import yaml

from trainer.config import ConfigError, PrecisionConfig
from trainer.config.fields import CONFIGS
from trainer.config.hardware import build_hardware
from trainer.config.typed import to_plain
from trainer.planning.estimate.rates import DeviceRates
from trainer.planning.hardware import load_hardware

SHIPPED = sorted(path.stem for path in (CONFIGS / "hardware").glob("*.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_hardware_has_a_peak_in_each_type(name):
    hardware = load_hardware(name)
    for kind in ("bf16", "fp16", "fp32"):
        pace = DeviceRates.of(hardware, PrecisionConfig(compute=kind))
        assert 0 < pace.products < pace.peak and max(pace.attention.values()) < pace.products
    assert build_hardware(yaml.safe_load(yaml.safe_dump(to_plain(hardware)))) == hardware  # as a probe would write it


@pytest.mark.parametrize(
    "changes, problems",
    [
        (["band=3"], ["hardware.band=3.0 must lie in [0, 1)"]),
        (["node.bandwidth=fast"], ["hardware.node.bandwidth=fast must be a number"]),
        (["devices=0"], ["hardware.devices=0 must be at least 1"]),
        (["peak.bf16=-1"], ["hardware.peak.bf16=-1.0 must be above 0"]),
    ],
)
def test_values_out_of_range(changes, problems):
    with pytest.raises(ConfigError) as error:
        load_hardware("h200", changes)
    assert error.value.problems == problems


def test_names_that_are_unknown():
    with pytest.raises(ConfigError, match="hardware=h20: there is no such file; did you mean 'h200'"):
        load_hardware("h20")
    with pytest.raises(ConfigError, match="unknown setting 'hardware.memry'; did you mean 'hardware.memory'"):
        load_hardware("h200", ["memry=3"])
    with pytest.raises(ConfigError, match="hardware.device has no value; set hardware.device=VALUE"):
        build_hardware({})
    with pytest.raises(ConfigError, match=r"hardware.device=Abacus has no known peak in bf16; set hardware.peak.bf16"):
        DeviceRates.of(load_hardware("h200", ["device=Abacus"]), PrecisionConfig(compute="bf16"))


def test_a_file_of_ones_own(tmp_path):
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / "mine.yaml").write_text(yaml.safe_dump(to_plain(load_hardware("h200", ["devices=3"]))))
    assert load_hardware("mine", config_dir=tmp_path).devices == 3
    assert load_hardware(str(tmp_path / "hardware" / "mine.yaml"), ["peak.bf16=1"]).peak == {"bf16": 1.0}


@pytest.mark.parametrize("content", [b"[1, 2]", b"3", b"a: b: c", b"\xff\xfe\x00", b"a: &a [*a]", b"[" * 10_000])
def test_files_that_hold_no_hardware(content, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{path}|hardware.device has no value"):
        load_hardware(str(path))
