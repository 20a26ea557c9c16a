"""What pyproject.toml cannot say: the packages are found, and configs/ is shipped as one more, trainer.configs."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["trainer", "trainer.*"]), "trainer.configs"],
    package_dir={"trainer.configs": "configs"},
    package_data={
        "trainer": ["py.typed"],
        "trainer.pages": ["templates/*", "vendor/*"],
        "trainer.configs": ["**/*.yaml"],
    },
)
