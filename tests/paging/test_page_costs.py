"""What a page costs to hand out: counted, and the same in a pool of any size."""

import sys

from minserve.paging.page_table import PageAllocator, PageTable

WHOLE = ("__iter__", "__contains__", "__reversed__", "__add__", "__eq__", "index", "count", "remove", "sort", "reverse",
         "copy")  # fmt: skip


class CountedList(list):
    """A list that counts the elements which its operations read, move or compare."""

    work = 0

    def __getitem__(self, index):
        self.work += len(range(*index.indices(len(self)))) if isinstance(index, slice) else 1
        return super().__getitem__(index)

    def __setitem__(self, index, value):
        self.work += len(self) if isinstance(index, slice) else 1
        super().__setitem__(index, value)

    def __delitem__(self, index):
        first = min(range(len(self))[index], default=len(self)) if isinstance(index, slice) else index % len(self)
        self.work += len(self) - first
        super().__delitem__(index)

    def pop(self, index=-1):
        self.work += len(self) - index % len(self)
        return super().pop(index)

    def insert(self, index, value):
        self.work += len(self) - index + 1
        super().insert(index, value)

    def append(self, value):
        self.work += 1
        super().append(value)


def counts_all(name):
    """A list's method that goes through the whole list."""

    def operation(self, *args, **kwargs):
        self.work += len(self)
        return getattr(list, name)(self, *args, **kwargs)

    return operation


for whole in WHOLE:
    setattr(CountedList, whole, counts_all(whole))


def every_operation(allocator):
    """Three rounds of all that an allocator and its tables can do."""
    for _ in range(3):
        table = PageTable(allocator, 4)
        table.grow(22)
        fork, _ = table.fork(22)
        allocator.share(table.pages)
        allocator.release(table.pages)
        table.shrink(9)
        assert allocator.take(allocator.num_pages + 1) is None
        assert allocator.num_free < allocator.num_pages and allocator.ref_count(table.pages[0]) == 2
        fork.release()
        table.release()


def counted_work(num_pages):
    """The cost of `every_operation` in a pool: opcodes run, and elements of the allocator's own lists touched."""
    allocator = PageAllocator(num_pages)
    allocator.release(allocator.take(num_pages))
    lists = {name: CountedList(value) for name, value in vars(allocator).items() if type(value) is list}
    assert lists
    vars(allocator).update(lists)
    num_opcodes = 0

    def trace(frame, event, arg):
        nonlocal num_opcodes
        num_opcodes += event == "opcode" and frame.f_code.co_filename != __file__
        frame.f_trace_opcodes = True
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        every_operation(allocator)
    finally:
        sys.settrace(before)
    return num_opcodes, sum(counted.work for counted in lists.values())


def test_an_operation_costs_the_same_in_a_pool_of_any_size():
    small, large = counted_work(16), counted_work(50_000)
    assert small == large and min(small) > 0
