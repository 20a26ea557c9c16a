"""What pyproject.toml cannot say: the packages are found, and configs/ and launch/ are shipped as two more,
trainer.configs and trainer.launch, of which sweeps need the script for Slurm."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["trainer", "trainer.*"]), "trainer.configs", "trainer.launch"],
    package_dir={"trainer.configs": "configs", "trainer.launch": "launch"},
    package_data={
        "trainer": ["py.typed"],
        "trainer.pages": ["templates/*", "vendor/*"],
        "trainer.configs": ["**/*.yaml"],
        "trainer.launch": ["slurm/train.sbatch"],
    },
)
