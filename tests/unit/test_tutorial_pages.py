"""Tests of tutorials run as printed: which blocks are commands, files and output, and which output is the same."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from tutorial_page import Block, blocks, first_missing, run_page, same

REPO = Path(__file__).resolve().parents[2]
PAGE = """# A page

```sh
test -f a.txt
echo "AP 88.4 after $(cat a.txt)"
```

```text
AP 90.1 after ...
```

```python
never = 1
```
"""


def test_blocks_are_commands_files_and_output() -> None:
    page = '```yaml title="a/b.yaml"\nx: 1\n```\n\n```sh\nls\n```\n```text\na\n```\n```python\nno\n```\n'
    assert blocks(page) == [
        Block("yaml", "a/b.yaml", "x: 1\n", 1),
        Block("sh", None, "ls\n", 5),
        Block("text", None, "a\n", 8),
    ]


@pytest.mark.parametrize(
    ("expected", "printed", "equal"),
    [
        ("AP 88.4  F.Ra 0.0", "AP 79.0   F.Ra 3.3", True),
        ("AP 88.4  F.Ra 0.0", "AP 32.0   F.Ra 0.0", False),
        ('{"topic": 0.981}', '{"topic": 0.871}', True),
        ('{"topic": 0.981}', '{"topic": 0.571}', False),
        ("took 0:02:44 of bb6a3a1cc42d", "took 0:00:01 of 9c1aa2384468", True),
        ("3 of 3 tasks", "2 of 3 tasks", False),
        ("lora  1  32.0  ...", "lora  1  31.0  84.0  467", True),
        ("[1/2] topic ... loss", "[1/2] topic  step 1/2  loss", True),
    ],
)
def test_a_line_is_the_same_but_for_what_differs_between_machines(expected: str, printed: str, equal: bool) -> None:
    assert same(expected, printed) is equal


def test_lines_are_found_in_their_order() -> None:
    assert first_missing("a\n...\nc\n", "a\nb\nc\n") is None
    assert first_missing("c\na\n", "a\nb\nc\n") == "a"


def test_a_page_is_run_in_its_folder(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    with pytest.raises(AssertionError, match=r"page\.md, line 3: status 1 of\ntest"):
        run_page(page, tmp_path)
    (tmp_path / "a.txt").write_text("all")
    run_page(page, tmp_path)
    page.write_text(PAGE.replace("90.1", "32.0"))
    with pytest.raises(AssertionError, match=r"'AP 32\.0 after \.\.\.' is not"):
        run_page(page, tmp_path)


def test_a_server_is_up_before_the_next_line_and_ended_with_the_page(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(
        "import http.server, os\n"
        "server = http.server.HTTPServer(('127.0.0.1', 0), http.server.SimpleHTTPRequestHandler)\n"
        "open('pid', 'w').write(str(os.getpid()))\n"
        "print(f'http://127.0.0.1:{server.server_port}', flush=True)\n"
        "server.serve_forever()\n"
    )
    page = tmp_path / "page.md"
    page.write_text("```sh\npython server.py &\nkill -0 $(cat pid)\n```\n")
    run_page(page, tmp_path)
    ended = int((tmp_path / "pid").read_text())
    left = time.monotonic() + 10  # its parent is gone too, and the process that inherits it may collect it late
    while psutil.pid_exists(ended) and psutil.Process(ended).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < left, "the server still runs after its page"
        time.sleep(0.02)


@pytest.mark.parametrize("page", sorted(REPO.glob("docs/tutorials/*.md")), ids=lambda page: page.stem)
def test_every_tutorial_has_commands_and_their_output(page: Path) -> None:
    languages = [block.language for block in blocks(page.read_text())]
    assert languages.count("sh") >= 3 and languages.count("text") >= 2
