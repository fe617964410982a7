"""The allocator setting: taken by glibc, and quietly left alone elsewhere."""

import ctypes
import platform

from minserve.freed_memory import keep_freed_memory


def test_glibc_takes_the_setting():
    assert keep_freed_memory() is (platform.libc_ver()[0] == "glibc")


def test_a_library_without_the_setting_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert keep_freed_memory() is False
