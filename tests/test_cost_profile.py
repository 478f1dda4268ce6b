"""Step times from a profile: what was measured is what is priced, and in between is in between."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from records.profile import ProfiledStep, ProfileError, StepProfile
from scheduler.features import StepFeatures
from simulator.cost import ProfileCost
from tests.simulation.command import command, is_refused, one_line, row, write_trace


def decode(batch: int, context: int, seconds: float) -> ProfiledStep:
    return ProfiledStep(
        decodes=batch, decode_context_tokens=batch * context, prefills=0, prefill_tokens=0,
        prefill_context_tokens=0, sampled=batch, repeats=5, seconds=seconds, min_s=seconds,
        max_s=seconds,
    )  # fmt: skip


def prompt(
    tokens: int, behind: int, seconds: float, decodes: int = 0, context: int = 0
) -> ProfiledStep:
    return ProfiledStep(
        decodes=decodes, decode_context_tokens=decodes * context, prefills=1, prefill_tokens=tokens,
        prefill_context_tokens=tokens + behind, sampled=decodes + 1, repeats=5, seconds=seconds,
        min_s=seconds, max_s=seconds,
    )  # fmt: skip


DECODES = [decode(b, c, 0.010 + 0.001 * b + 1e-6 * b * c) for b in (1, 4, 16) for c in (100, 1000)]
PROMPTS = [prompt(t, c, 0.012 + 1e-4 * t + 1e-8 * t * c) for t in (16, 256) for c in (0, 512, 2048)]
MIXED = [prompt(256, 0, 0.0236 + 0.0376 - 0.5 * 0.0236, decodes=4, context=2400)]


def cost_of(folder: Path, *steps: ProfiledStep, **settings: object) -> ProfileCost:
    StepProfile({"model": "m", "device": "d", **settings}, list(steps)).write(folder / "p.json")
    return ProfileCost(folder / "p.json", "m")


def features(*sequences: tuple[int, int]) -> StepFeatures:
    """(tokens granted, computed before) of each."""
    granted = np.array([granted for granted, _ in sequences], np.int64)
    before = np.array([before for _, before in sequences], np.int64)
    ones = np.ones(len(granted), np.bool_)
    return StepFeatures(granted, before, ones, granted == 1)


def test_what_was_measured_is_what_is_priced(tmp_path: Path) -> None:
    cost = cost_of(tmp_path, *DECODES, *PROMPTS)
    for step in DECODES:
        context = step.decode_context_tokens // step.decodes
        price = cost.price(features(*[(1, context - 1)] * step.decodes))
        assert price.duration_ns == pytest.approx(1e9 * step.seconds, rel=1e-9)
    for step in PROMPTS:
        behind = step.prefill_context_tokens - step.prefill_tokens
        price = cost.price(features((step.prefill_tokens, behind)))
        assert price.duration_ns == pytest.approx(1e9 * step.seconds, rel=1e-9)
    assert not any("outside" in line for line in cost.describe())


def test_between_points_it_is_linear(tmp_path: Path) -> None:
    """Both formulas above are linear in each of their quantities: interpolation is exact."""
    cost = cost_of(tmp_path, *DECODES, *PROMPTS)
    price = cost.price(features(*[(1, 399)] * 10))
    assert price.duration_ns == pytest.approx(1e9 * (0.010 + 0.010 + 1e-6 * 10 * 400))
    price = cost.price(features((100, 300)))
    assert price.duration_ns == pytest.approx(1e9 * (0.012 + 0.01 + 1e-8 * 100 * 300))


def test_mixed_steps_share_what_the_profile_says(tmp_path: Path) -> None:
    step = features((1, 2399), (1, 2399), (1, 2399), (1, 2399), (256, 0))
    apart = cost_of(tmp_path, *DECODES, *PROMPTS).price(step).duration_ns
    cost = cost_of(tmp_path, *DECODES, *PROMPTS, *MIXED)
    assert cost.price(step).duration_ns == pytest.approx(1e9 * MIXED[0].seconds, rel=1e-6)
    assert cost.price(step).duration_ns < apart
    assert sum(cost.terms(step).values()) == cost.price(step).duration_ns
    assert any("less 50% of the smaller, from 1 mixed" in line for line in cost.describe())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=20), st.integers(1, 50))
def test_a_run_is_its_steps(contexts: list[int], num_steps: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepProfile, "read", lambda path: StepProfile({}, [*DECODES, *PROMPTS]))
        cost = ProfileCost(Path("p.json"), "m")
    run = cost.price_steps(features(*[(1, c) for c in contexts]), num_steps)
    singles = [
        cost.price(features(*[(1, c + i) for c in contexts])).duration_ns for i in range(num_steps)
    ]
    assert run.duration_ns.tolist() == singles
    assert (np.diff(run.duration_ns) >= 0).all()


def test_outside_of_what_was_measured_the_line_goes_on_and_is_counted(tmp_path: Path) -> None:
    cost = cost_of(tmp_path, *DECODES, *PROMPTS)
    far = cost.price(features(*[(1, 1999)] * 32)).duration_ns
    assert far == pytest.approx(1e9 * (0.010 + 0.032 + 1e-6 * 32 * 2000))
    near = cost.price(features((1, 9))).duration_ns  # no cheaper than the least that was measured
    assert near == pytest.approx(1e9 * DECODES[0].seconds)
    cost.price(features((1, 500)))
    assert any("66.7% of the steps priced lie outside" in line for line in cost.describe())


def test_a_profile_without_a_kind_of_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="has no decode steps"):
        cost_of(tmp_path, *PROMPTS)
    with pytest.raises(ProfileError, match="has no steps of prompts alone"):
        cost_of(tmp_path, *DECODES, *MIXED)


def test_on_the_command_line(tmp_path: Path) -> None:
    cost_of(tmp_path, *DECODES, *PROMPTS, model="another")
    trace = write_trace(tmp_path / "t.jsonl", [row(i / 10, 300, 20) for i in range(30)])
    done = command("--trace", trace, "--kv-gb", 1, "--cost-model", f"profile:{tmp_path / 'p.json'}")
    assert done.code == 0, done.err
    said = one_line(done.out)
    assert "step times interpolated from p.json: 12 kinds of step measured (model another" in said
    assert "beware: the profile is of another" in said
    assert "of the steps priced lie outside of what was measured" in said
    refused = command("--trace", trace, "--kv-gb", 1, "--cost-model", "profile:nowhere.json")
    is_refused(refused, "nowhere.json", "cannot be read")
