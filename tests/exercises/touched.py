"""Count how many entries of an object's containers a call looks at: what it costs, whatever the machine."""

from collections import deque


class Meter:
    """Counts the entries that are looked at in the lists, deques, sets and dicts of objects that it watches."""

    def __init__(self):
        self.num_touched = 0

    def watch(self, owner):
        """Put counting containers in place of an object's plain ones; again after each call, for some may be new."""
        for name, value in vars(owner).items():
            if type(value) in COUNTING:
                counting = COUNTING[type(value)](value)
                counting.meter = self
                setattr(owner, name, counting)


def _counting(kind, **costs):
    """A subclass of a container that tells `meter` what each method costs: cost(container, *arguments) entries."""

    def method(name, cost):
        def counted(self, *arguments, **options):
            self.meter.num_touched += cost(self, *arguments)
            return getattr(kind, name)(self, *arguments, **options)

        return counted

    def walk(self):
        for entry in kind.__iter__(self):
            self.meter.num_touched += 1
            yield entry

    return type(kind.__name__, (kind,), {name: method(name, cost) for name, cost in costs.items()} | {"__iter__": walk})


def _one(self, *arguments):
    return 1


def _all(self, *arguments):
    return len(self)


def _both(self, other):
    return len(self) + len(other)


def _those_behind(self, place=-1, *arguments):
    """Taking an entry out of a list, or putting one in, moves all behind it."""
    return 1 + len(self) - (place % len(self) if self else 0)


def _deleted(self, place):
    """Deleting an entry, or a slice, moves all behind its start."""
    first = min(range(len(self))[place], default=len(self)) if isinstance(place, slice) else place % len(self)
    return 1 + len(self) - first


def _place(self, place, *arguments):
    """An entry, or those of a slice."""
    return len(range(*place.indices(len(self)))) if isinstance(place, slice) else 1


_SEARCHES = dict.fromkeys(("__contains__", "index", "count", "remove", "copy", "reverse"), _all)
COUNTING = {
    list: _counting(
        list, **_SEARCHES, sort=_all, __add__=_both, pop=_those_behind, insert=_those_behind, __getitem__=_place,
        __setitem__=_place, __delitem__=_deleted, append=_one,
    ),
    deque: _counting(
        deque, **_SEARCHES, rotate=_all, insert=_all, __getitem__=_one, pop=_one, popleft=_one, append=_one,
        appendleft=_one,
    ),
    set: _counting(set, __contains__=_one, __sub__=_both, __or__=_both, __and__=_both, copy=_all, pop=_one),
    dict: _counting(
        dict, __contains__=_one, __getitem__=_one, __setitem__=_one, get=_one, items=_all, keys=_all, values=_all,
        copy=_all,
    ),
}  # fmt: skip
