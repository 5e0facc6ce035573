from pathlib import Path

from mmjax.training.compiled_program import read_program
from mmjax.training.peak_memory import AtPeak, alive_at_peak

# ruff: noqa: E501
PROGRAM = """HloModule step, is_scheduled=true

%body (state: (f32[256])) -> (f32[256]) {
  %state = (f32[256]{0}) parameter(0)
  ROOT %rest = (f32[256]{0}) custom-call(%state), custom_call_target="k", metadata={op_name="step/transpose(jvp())/while/body/checkpoint/rows/mpmd_map"}
}

ENTRY %main (given: f32[256]) -> f32[256] {
  %given = f32[256]{0} parameter(0)
  %made = f32[256]{0} negate(%given), metadata={op_name="step/jvp()/neg"}
  %again = f32[256]{0} negate(%made), metadata={op_name="step/transpose(jvp())/checkpoint/rematted_computation/neg"}
  %held = (f32[256]{0}) while(%again), condition=%condition, body=%body
  ROOT %out = f32[256]{0} get-tuple-element(%held), index=0
}
"""
REPORT = """HloLiveRange (max 9):
  BufferLiveRange:
    made{}:1-9
  Live ranges at 5 (peak):
    held{0}: 4096 bytes (cumulative: 4096 bytes)
    made{}: 1024 bytes (cumulative: 5120 bytes)
    rest{0}: 1024 bytes (cumulative: 6144 bytes)
    rest{1}: 512 bytes (cumulative: 6656 bytes)
    again{}: 256 bytes (cumulative: 6912 bytes)
    given{}: 8 bytes (cumulative: 6920 bytes)
    unheard-of{}: 4 bytes (cumulative: 6924 bytes)
  Stack trace breakdown for peak usage: 6924 bytes
    main: 1 bytes
"""


def test_arrays_alive_at_the_peak_are_summed_by_what_makes_them(tmp_path: Path):
    (tmp_path / "module_1.step-live-range.txt").write_text(REPORT)
    (tmp_path / "module_0.helper-live-range.txt").write_text("HloLiveRange (max 1):\n")
    assert alive_at_peak(tmp_path, read_program(PROGRAM)) == [
        AtPeak("results of loops: kept for the backward pass, gradients", 1, 4096),
        AtPeak("rows, backward", 2, 1536),
        AtPeak("neg, forward", 1, 1024),
        AtPeak("neg, computed again", 1, 256),
        AtPeak("arguments", 1, 8),
        AtPeak("other", 1, 4),
    ]


def test_without_a_report_there_is_nothing_to_tell(tmp_path: Path):
    assert alive_at_peak(tmp_path, read_program(PROGRAM)) == []
