"""Profiles of the devices that are here, and their files."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import jax

from sharding_rules.lab import LabError
from sharding_rules.lab.profile import Profile, load_profile
from sharding_rules.lab.saved import write


def profile_here(**measured: Any) -> Profile:
    """Returns a profile of the devices of this run. measured: collectives, matmuls, mesh."""
    device = jax.devices()[0]
    return Profile(
        platform=device.platform,
        device=device.device_kind,
        date=datetime.date.today().isoformat(),
        n_devices=jax.device_count(),
        n_processes=jax.process_count(),
        versions={"jax": jax.__version__},
        **measured,
    )


def save(profile: Profile, file: Path) -> Profile:
    """Writes a profile, with what an older file of that name has of the same hardware besides.

    Returns what was written. Raises LabError if the file is no profile, is of other hardware, or
    cannot be written.
    """
    if file.exists():
        profile = profile.merged(load_profile(str(file)))
    write(str(file), profile.to_json())
    return profile


def require_mergeable(profile: Profile, file: Path) -> None:
    """Raises LabError where `save` would refuse the file, before anything is measured."""
    if file.exists():
        profile.merged(load_profile(str(file)))
    elif file.suffix != ".json":
        raise LabError(f"{file}: a profile is a file that ends in .json")
