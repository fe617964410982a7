"""The commands: what they print, and that an error is one line."""

import pytest

from minserve.__main__ import main


def test_generate_streams_text_then_its_figures(small_folder, capsys):
    assert main(["generate", "def area(", "--model", str(small_folder), "--max-tokens", "9", "--seed", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("def area(") and "TTFT" in out and "tokens/s" in out and "prefill" in out


def test_generate_chat_does_not_repeat_the_prompt(small_folder, capsys):
    assert main(["generate", "a question", "--chat", "--model", str(small_folder), "--max-tokens", "3"]) == 0
    assert "a question" not in capsys.readouterr().out


WRONG = [
    (["--max-tokens", "-3"], "max_tokens"),
    (["--temperature", "nan"], "temperature"),
    (["--model", "nowhere"], "nowhere"),
    (["--dtype", "int3"], "dtype"),
]


@pytest.mark.parametrize("wrong,named", WRONG)
def test_an_error_is_one_line_and_status_2(small_folder, capsys, wrong, named):
    assert main(["generate", "x", "--model", str(small_folder), *wrong]) == 2
    err = capsys.readouterr().err
    assert named in err and err.startswith("minserve: ") and err.count("\n") == 1


def test_doctor_says_what_the_model_is_and_what_is_missing(small_folder, capsys, monkeypatch):
    assert main(["doctor", "--model", str(small_folder)]) == 0
    out = capsys.readouterr().out
    for part in (
        "torch",
        "1 Gated DeltaNet + 1 gated attention",
        "resident",
        "active per token",
        "bytes per token",
        "MTP head      no",
    ):
        assert part in out
    monkeypatch.setattr("minserve.doctor.find_spec", lambda name: None)
    assert main(["doctor", "--model", str(small_folder)]) == 0
    assert "triton        missing, needed for kernels: pip install 'minserve[triton]'" in capsys.readouterr().out
