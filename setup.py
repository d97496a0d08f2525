"""What pyproject.toml cannot say: the folder graphs/ is installed as the package
``graphrun.graphs``."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["graphrun", "graphrun.*"]), "graphrun.graphs"],
    package_dir={"graphrun.graphs": "graphs"},
)
