"""Pipeline schedules for property tests."""

from hypothesis import strategies as st

from mesh_lm.schedules.schedule import NAMES, Schedule, make_schedule


@st.composite
def schedules(draw: st.DrawFn, names: tuple[str, ...] = tuple(NAMES)) -> Schedule:
    """Any schedule that `make_schedule` can make, of up to 6 stages of 3 chunks."""
    name, stages = draw(st.sampled_from(names)), draw(st.integers(1, 6))
    chunks = draw(st.integers(1, 3)) if NAMES[name].chunked else 1
    microbatches = draw(st.integers(1, 13)) if chunks == 1 else stages * draw(st.integers(1, 3))
    return make_schedule(
        name, stages, microbatches, chunks, packed=draw(st.sampled_from((None, True, False)))
    )
