"""The command as a whole: one line for every mistake, exit codes, help, and the process around it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import vispe_

# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_no_command_and_wrong_commands(complaint):
    assert "COMMAND" in complaint()
    assert "'mach'" in complaint("mach")
    assert "IMAGE1" in complaint("match", "a.png")
    assert "--out" in complaint("extract", "a.png")
    assert "'pictures'" in complaint("list", "pictures")
    assert "KIND" in complaint("evaluate")
    assert "'pictures'" in complaint("evaluate", "pictures")


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (("list", "models", "train.lr=1"), "train.lr=1"),  # only a recipe has overrides
        (("predict", "run", "a.png", "--out", "p.csv", "train.lr=1"), "train.lr=1"),
        (("evaluate", "classify", "run", "another", "--data", "photos"), "another"),
        (("train", "a.yaml", "--lr", "1"), "--lr 1"),
        (("list", "models", "--vers"), "--vers"),  # no abbreviations: a new option shall not change what they mean
    ],
)
def test_words_that_are_left_over_are_named(complaint, words, left):
    assert complaint(*words) == f"vispe: unrecognized arguments: {left} (see vispe --help)\n"


@pytest.mark.parametrize("command", ["train", "ablate"])
def test_overrides_may_stand_behind_options(command, monkeypatch):
    seen = []
    monkeypatch.setattr(f"vispe.commands.training.run_{command}", lambda options: seen.append(options.overrides))
    assert vispe_(command, "a.yaml", "train.lr=1", "--out", "run", "train.epochs=2", "seed=3") == 0
    assert seen == [["train.lr=1", "train.epochs=2", "seed=3"]]


def test_messages_of_many_lines_and_none_are_one_line(complaint, monkeypatch):
    for error, shown in (
        (ValueError("a\nb\r\nc\u2028d"), "a b c d"),
        (OSError(), "OSError"),
        (MemoryError(), "Memory"),
    ):
        monkeypatch.setattr("vispe.commands.facts.run_list", fails(error))
        assert shown in complaint("list", "models")


def fails(error):
    def run(options):
        raise error

    return run


def test_memory_that_torch_lacks_is_a_line_and_other_errors_are_not_hidden(complaint, monkeypatch):
    error = RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes\nC++ frames")
    monkeypatch.setattr("vispe.commands.facts.run_list", fails(error))
    assert "not enough memory" in complaint("list", "models")
    monkeypatch.setattr("vispe.commands.facts.run_list", fails(RuntimeError("a bug of ours")))
    with pytest.raises(RuntimeError, match="a bug of ours"):
        vispe_("list", "models")


def test_ctrl_c_is_130_without_a_traceback(monkeypatch, capfd):
    monkeypatch.setattr("vispe.commands.facts.run_list", fails(KeyboardInterrupt()))
    assert vispe_("list", "models") == 130
    assert capfd.readouterr() == ("", "vispe list: interrupted\n")


def test_a_mistake_of_a_kind_says_which(complaint, monkeypatch):
    monkeypatch.setattr("vispe.commands.evaluation.run_classify", fails(ValueError("no")))
    assert complaint("evaluate", "classify", "run", "--data", "photos") == "vispe evaluate classify: no\n"


# --- the process ------------------------------------------------------------------------------------------------------


def test_a_reader_that_leaves_is_no_error():
    command = [sys.executable, "-m", "vispe", "list", "models"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""


def test_python_dash_m_is_the_command():
    ran = subprocess.run([sys.executable, "-m", "vispe", "match", "a"], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert len(ran.stderr.splitlines()) == 1
    script = Path(sys.executable).with_name("vispe")
    if script.exists():
        assert subprocess.run([script, "match", "a"], capture_output=True, text=True, check=False).stderr == ran.stderr


@pytest.mark.parametrize("words", [("--version",), ("--help",), ("evaluate", "classify", "--help")])
def test_what_needs_no_work_imports_nothing_for_it(words):
    heavy = ("torch", "numpy", "PIL", "cv2", "matplotlib", "rich", "lightning", "pydantic")
    code = "import atexit, sys; from vispe.cli import main\n"
    code += f"atexit.register(lambda: print(*[name for name in {heavy} if name in sys.modules], file=sys.stderr))\n"
    code += "main(sys.argv[1:])"
    ran = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert ran.stderr == "\n"


# --- help -------------------------------------------------------------------------------------------------------------


HELP = ["", "match", "match-pairs", "extract", "demo", "train", "ablate", "predict", "evaluate", "list", "plot"]
KINDS = ["classify", "semantic", "coco-detection", "coco-panoptic", "hpatches", "megadepth1500", "scannet1500", "pairs"]
KINDS += ["images", "stress", "score", "compare"]


@pytest.mark.parametrize("command", [*HELP, "export", *(f"evaluate {kind}" for kind in KINDS)])
def test_help_is_tidy(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert vispe_(*command.split(), "--help") == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: {' '.join(['vispe', *command.split()])} [-h]")
    assert max(map(len, text.splitlines())) <= 100


def test_help_lists_every_command_and_every_kind(capsys):
    for words, wanted in (((), {words.split()[0] for words in HELP[1:]} | {"export"}), (("evaluate",), set(KINDS))):
        assert vispe_(*words, "--help") == 0
        lines = capsys.readouterr().out.splitlines()
        assert wanted <= {line.split()[0] for line in lines if line.startswith("    ")}
