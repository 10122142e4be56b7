"""What docs/multi_host.md says of the secret and of ports: its figures and names are those of the
code."""

from pathlib import Path

from mesh_lm import strict_json
from mesh_lm.checkpoint import copies
from mesh_lm.launch import controller
from mesh_lm.network import channel, environment, rendezvous, secret

PAGE = " ".join(
    (Path(__file__).parents[2] / "docs" / "multi_host.md").read_text(encoding="utf-8").split()
)


def test_figures_and_names() -> None:
    assert f"keeps at most {channel._BEFORE_PROOF} bytes" in PAGE
    assert (
        f"for at most {controller._HELLO:g} s ({rendezvous._HANDSHAKE:g} s at the rendezvous)"
        in PAGE
    )
    assert (
        f"more than {controller._CALLERS} such connections" in PAGE
        and controller._CALLERS == rendezvous._CALLERS
    )
    assert f"({copies._CALLERS} for local checkpoints)" in PAGE
    assert strict_json.MESSAGE == 2**20 and "A message has at most 1 MiB" in PAGE
    places = (
        f"| `{environment.SECRET}`",
        f"`{environment.SECRET_FILE}` names",
        f"| `{secret.OWN_FILE}`",
    )
    assert [*map(PAGE.index, places)] == sorted(map(PAGE.index, places))
    assert f"at least {secret._SHORTEST} characters" in PAGE
