"""Addresses that a shell or ssh could misread, and what ssh says in words for a user."""

from __future__ import annotations

import pytest

from hwnas.errors import ConfigError, DeviceError
from hwnas.system import ssh
from hwnas.system.ssh import Address, one_line

REFUSED = [
    "", "raspberry", "-oProxyCommand=x@y", "pi@-oProxyCommand", "pi@a;b", "pi@$(x)", "pi@`x`", "pi@a b", "pi@a\nb",
    "p'i@a", "pi@a:70000", "pi@a:22:23", "pi@a/b", "@a", "pi@", "pi@a|b", "pi@a&", "pi@a>b", "pi@ä", "a@b@c", "cuda",
    "pi@" + "a" * 300]


def test_what_a_shell_or_ssh_could_take_for_more_is_refused() -> None:
    for text in ("pi@raspberry", "a.b_c-1@10.0.0.2:2222", "pi@board.example.org", "x@y"):
        assert Address.read(text).arguments[-2:] == ["--", text.partition(":")[0]]
    for text in REFUSED:
        with pytest.raises(ConfigError, match="device must be user@host"):
            Address.read(text)
    assert Address.read("pi@a", "~/venv/bin/python3.12").python == "~/venv/bin/python3.12"
    for python in ("", "-c", "python3;x", "python 3", "$(x)", "py'thon", "a\nb", "--version"):
        with pytest.raises(ConfigError, match="device_python"):
            Address.read("pi@a", python)


CHANGED = ("@@@@@\n@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\n@@@@@\nHost key for [192.168.0.7]:2222 "
           "has changed and you have requested strict checking.\nHost key verification failed.\n")


@pytest.mark.parametrize(("said", "code", "words"), [
    (CHANGED, 255,  # `board` is an alias
     ["another host key", "ssh-keygen -R '[192.168.0.7]:2222'", "ssh -p 2222 pi@board"]),
    ("No ED25519 host key is known for b and you have requested strict checking.\nHost key verification failed.", 255,
     ["not known", "fingerprint", "ssh -p 2222 pi@board"]),
    ("pi@board: Permission denied (publickey,password).", 255, ["takes no key", "ssh-copy-id -p 2222 pi@board"]),
    ("bash: line 1: python3: command not found", 127, ["has no python3", "device_python="]),
    ("ssh: Could not resolve hostname board: Name or service not known", 255, ["resolve", "pi@board true"]),
    ("ssh: connect to host board port 2222: Connection refused", 255, ["refused", "pi@board true"]),
    ("Traceback:\nModuleNotFoundError: No module named 'numpy'", 1,
     ["pi@board:2222: ModuleNotFoundError: No module named 'numpy'. It needs", "python3 -m pip install numpy"]),
    ("", 255, ["exit code 255"])])
def test_what_ssh_says_in_one_line_with_the_next_command(said: str, code: int, words: list[str]) -> None:
    why = ssh._why(said, code, Address.read("pi@board:2222"))
    assert "\n" not in why
    assert all(word in why for word in words), why


def test_words_of_another_machine_cannot_move_the_cursor() -> None:
    assert one_line("a\x1b[2J\rb\n\tc\u202ed") == "a [2J b c d"
    assert len(one_line("x" * 10_000)) == 300
    assert one_line({"a\r": ["b\r", 3]}) == {"a": ["b", 3]}


def test_without_ssh_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DeviceError, match="apt install openssh-client"):
        ssh.Connection(Address.read("pi@a"), "")


def test_a_login_may_print_but_not_for_ever_and_unknown_keys_are_refused(board, monkeypatch):
    board.reached(before="echo Welcome to the board; echo hwnas-")
    connection = ssh.Connection(Address.read("me@board", "python3"), "print(marker, flush=True)")
    connection.close()
    said = (board.folder / "calls").read_text()
    assert "StrictHostKeyChecking=yes" in said
    assert "BatchMode=yes" in said
    board.reached(before="yes")
    monkeypatch.setattr(ssh, "CONNECT_S", 0.5)
    with pytest.raises(ConnectionError, match=r"did not start within .* ssh me@board python3 -V"):
        ssh.Connection(Address.read("me@board", "python3"), "pass")
