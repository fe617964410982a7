"""Usual mistakes in chapter 4: {exercise: [(name, what to tell who made it, {words of the solution: wrong words})]}."""

WRONG = {
    "4.1": [
        ("page_plus_position", "a page begins at slot page x page_size, and the offset counts from there",
         {"page * page_size + offset": "page + position"}),
        ("quotient_and_remainder_swapped", "position // page_size says which page, position % page_size where in it",
         {"pages[position // page_size], position % page_size": "pages[position % page_size], position // page_size"}),
        ("start_ignored", "the slots of positions start to stop - 1 are asked for, not those from 0 on",
         {"range(start, stop)": "range(stop)"}),
        ("no_page_table", "pages lie anywhere in memory: the page table says where",
         {"pages[position // page_size]": "position // page_size"}),
        ("pages_one_after_another", "each page has a place of its own: only the first one begins at pages[0]",
         {"pages[position // page_size]": "pages[0] + position // page_size"}),
        ("stop_included", "stop is not one of the positions", {"range(start, stop)": "range(start, stop + 1)"}),
    ],
    "4.2": [
        ("keeps_a_partial_grab", "who gets None holds nothing: look whether there are enough before you take one",
         {"if num > len(self._free):\n            return None\n": "pages = []\n",
          "pages = [self._free.pop() for _ in range(num)]\n":
          "for _ in range(num):\n            if not self._free:\n                return None\n"
          "            pages.append(self._free.pop())\n"}),
        ("gives_what_there_is", "all pages or none: fewer than asked for are of no use",
         {"if num > len(self._free):\n            return None\n": "num = min(num, len(self._free))\n"}),
        ("page_0_is_falsy", "0 is a page like any other: test for None, not for falsehood",
         {"        for page in pages:\n            self._counts[page] = 1":
          "        if not all(pages):\n            return None\n        for page in pages:\n"
          "            self._counts[page] = 1"}),
        ("no_pages_is_none", "take(0) gets its 0 pages: an empty list, not None",
         {"if num > len(self._free)": "if num > len(self._free) or num == 0"}),
        ("frees_twice", "a page that stands twice in the list becomes free once: when its count reaches 0",
         {"            self._counts[page] -= 1\n            if self._counts[page] == 0:\n"
          "                self._free.append(page)":
          "            self._counts[page] -= 1\n"
          "        self._free += [page for page in pages if self._counts[page] == 0]"}),
        ("below_0", "nobody can give back what nobody holds: that is somebody's bug, and must show at once",
         {"num_dropped > self._counts[page]": "False"}),
        ("checks_each_entry_alone", "a page may stand in the list more often than it has references",
         {"num_dropped > self._counts[page]": "self._counts[page] == 0"}),
        ("half_released", "a call that raises changes nothing: check all pages before you drop the first",
         {"Counter(pages).items()": "[*Counter(pages).items(), (None, 0)][:-1]",
          "if num_dropped > self._counts[page]": "self._counts[page] -= num_dropped\n"
          "            self._free += [page] if self._counts[page] == 0 else []\n"
          "            if self._counts[page] < 0",
          "        for page in pages:\n            self._counts[page] -= 1\n            if self._counts[page] == 0:\n"
          "                self._free.append(page)\n": ""}),
        ("freed_while_shared", "a page is free when its last holder has given it back, not its first",
         {"self._counts[page] -= 1": "self._counts[page] = 0"}),
        ("never_freed", "at 0 references a page goes back to the free ones",
         {"                self._free.append(page)": "                pass"}),
        ("shared_once_for_all", "one more reference for each entry, also when a page stands in the list twice",
         {"            self._counts[page] += 1": "            self._counts[page] = 2"}),
        ("shares_a_free_page", "a free page may become anybody's: who shares it reads what others write",
         {"any(self._counts[page] == 0 for page in pages)": "False"}),
        ("scans_the_counts", "to look for free pages among all takes longer the larger the pool is: keep a list",
         {"[self._free.pop() for _ in range(num)]":
          "[page for page in range(self.num_pages) if self._counts[page] == 0][:num]\n"
          "        del self._free[len(self._free) - num :]"}),
        ("asks_the_free_list", "`in` looks at every free page: the count says whether a page is free",
         {"if self._counts[page] == 0:\n": "if self._counts[page] == 0 and page not in self._free:\n"}),
        ("pool_walked_for_each_page", "a search looks at all pages, and pop(0) moves all: take from the end of a list",
         {"self._free.pop()": "self._free.pop(0)"}),
    ],
    "4.3": [
        ("floor", "a page that is begun is a page", {"math.ceil(stop / page_size)": "stop // page_size",
                                                     "math.ceil(num_tokens / page_size)": "num_tokens // page_size"}),
        ("last_pages_room_unused", "the last page may have room for some of the new tokens",
         {"math.ceil(stop / page_size) - math.ceil(num_tokens / page_size)":
          "math.ceil((stop - num_tokens) / page_size)"}),
        ("looks_ahead_past_the_maximum", "no token is ever kept past max_tokens, and the page table may have no room",
         {"min(num_tokens + num_new, max_tokens)": "num_tokens + num_new"}),
        ("pages_it_has_already", "the pages for num_tokens are there: only those besides are needed",
         {" - math.ceil(num_tokens / page_size)": ""}),
        ("one_page_more", "tokens that just fill their pages need no other one",
         {"math.ceil(stop / page_size)": "(stop // page_size + 1)"}),
    ],
    "4.4": [
        ("shares_the_partial_page", "all branches would write their next token into the same slot of it",
         {"pages[: num_tokens // page_size]": "pages[: math.ceil(num_tokens / page_size)]",
          "num_tokens % page_size > 0": "False"}),
        ("copies_all_pages", "nobody writes into a full page any more: it can be shared",
         {"pages[: num_tokens // page_size]": "[]",
          "(num_branches - 1) * is_partial": "(num_branches - 1) * math.ceil(num_tokens / page_size)",
          "taken[branch : branch + 1]": "taken[branch :: num_branches - 1]",
          "[(pages[len(full)], target) for target in own]": "list(zip(pages, own))"}),
        ("no_reference", "the first branch to finish would give away pages that the others still read",
         {"        allocator.share(full)\n": ""}),
        ("one_reference_for_all", "each branch will give back a reference of its own",
         {"    tables, copies = [pages], []": "    allocator.share(full)\n    tables, copies = [pages], []",
          "        allocator.share(full)\n        own": "        own"}),
        ("a_copy_for_every_branch", "one branch can go on in the page that is there, which is nobody's otherwise",
         {"(num_branches - 1) * is_partial": "num_branches * is_partial", "[pages], []": "[], []",
          "range(num_branches - 1)": "range(num_branches)"}),
        ("one_copy_for_all", "two branches in one copy overwrite each other as they would in the original",
         {"(num_branches - 1) * is_partial": "(num_branches > 1) * is_partial",
          "taken[branch : branch + 1]": "list(taken)"}),
        ("full_last_page_copied", "a last page that is full gets no more tokens: there is nothing to copy",
         {"pages[: num_tokens // page_size]": "pages[: (num_tokens - 1) // page_size]",
          "num_tokens % page_size > 0": "True"}),
        ("shared_in_vain", "when there is no page for the copies, nothing may stay shared",
         {"    taken =": "    for _ in range(num_branches - 1):\n        allocator.share(full)\n    taken =",
          "        allocator.share(full)\n        own": "        own"}),
        ("shares_pages_ahead", "a page ahead is for the first branch's next tokens; the others need their own",
         {"tables.append(full + own)": "tables.append(full + own + pages[len(full) + is_partial :])"}),
    ],
    "4.5": [
        ("tail_read", "0 x NaN is NaN: to mask the tail is not enough, cut it off",
         {"keys = k_pages[used].flatten(0, 1)[:num_tokens]": "keys = k_pages[used].flatten(0, 1)",
          "values = v_pages[used].flatten(0, 1)[:num_tokens]": "values = v_pages[used].flatten(0, 1)",
          "torch.arange(num_tokens) >": "torch.arange(len(keys)) >"}),
        ("pages_in_memory_order", "the page table says in which order the pages follow one another",
         {"torch.tensor(page_table[: math.ceil(num_tokens / page_size)])":
          "torch.tensor(sorted(page_table[: math.ceil(num_tokens / page_size)]))"}),
        ("values_from_other_pages", "keys and values of a token lie in the same slot, of the same page table",
         {"v_pages[used]": "v_pages[: len(used)]"}),
        ("no_page_table_at_all", "the first pages of the pool are anybody's",
         {"k_pages[used]": "k_pages[: len(used)]", "v_pages[used]": "v_pages[: len(used)]"}),
        ("paged_mask_top_left", "the queries are the last tokens: query i of n stands at position num_tokens - n + i",
         {"torch.arange(num_tokens - len(q), num_tokens)": "torch.arange(len(q))"}),
        ("paged_future", "a query must not see the keys after it",
         {"scores.masked_fill(hidden[:, None], -torch.inf)": "scores"}),
        ("full_pages_only", "a page that is only partly full is read too, as far as it is full",
         {"math.ceil(num_tokens / page_size)": "num_tokens // page_size",
          "torch.arange(num_tokens) >": "torch.arange(len(keys)) >"}),
        ("paged_kv_heads_in_turn", "neighbouring heads share a KV head: 0 0 1 1, not 0 1 0 1",
         {"keys = k_pages[used].flatten(0, 1)[:num_tokens].repeat_interleave(share, dim=1)":
          "keys = k_pages[used].flatten(0, 1)[:num_tokens].repeat(1, share, 1)",
          "values = v_pages[used].flatten(0, 1)[:num_tokens].repeat_interleave(share, dim=1)":
          "values = v_pages[used].flatten(0, 1)[:num_tokens].repeat(1, share, 1)"}),
        ("paged_scores_not_scaled", "scores are scaled by dim ** -0.5", {" * q.shape[-1] ** -0.5": ""}),
    ],
    "4.6": [
        ("waste_half_a_page", "0 to page_size - 1 tokens stay unused, (page_size - 1) / 2 on average",
         {"(page_size - 1) / 2": "page_size / 2"}),
        ("waste_nearly_a_page", "that is the worst case: on average half as many tokens stay unused",
         {"(page_size - 1) / 2": "(page_size - 1)"}),
        ("mean_of_ratios", "a mean of shares counts a short request as much as a long one: sum up, then divide",
         {"unused_tokens = len(num_tokens) * (page_size - 1) / 2": "unused_tokens = (page_size - 1) / 2",
          "num_pages = (sum(num_tokens) + unused_tokens) / page_size":
          "each = [(n, (n + unused_tokens) / page_size) for n in num_tokens]",
          "overhead_bytes = unused_tokens * bytes_per_token + num_pages * bytes_per_page":
          "ratios = [(unused_tokens * bytes_per_token + p * bytes_per_page) / (n * bytes_per_token) for n, p in each]",
          "overhead_bytes / (sum(num_tokens) * bytes_per_token)": "sum(ratios) / len(ratios)"}),
        ("page_cost_ignored", "if pages cost nothing, pages of one token would waste least",
         {" + num_pages * bytes_per_page": ""}),
        ("pages_of_used_tokens_only", "the last page is a whole one: used and unused tokens together fill the pages",
         {"(sum(num_tokens) + unused_tokens) / page_size": "sum(num_tokens) / page_size"}),
        ("waste_of_one_request", "each request has a last page of its own",
         {"len(num_tokens) * (page_size - 1) / 2": "(page_size - 1) / 2"}),
    ],
    "4.7": [
        ("blocks_for_ramps", "no request is ever lost so, but each holds back its last page from the start",
         {"math.ceil((now + step) / page_size)": "math.ceil((now + left) / page_size)"}),
        ("admits_in_order", "while a long request holds its pages, several short ones would finish in them",
         {"sorted(range(len(waiting)), key=lambda i: waiting[i][1] * (waiting[i][0] + waiting[i][1] / 2))":
          "range(len(waiting))"}),
        ("looks_one_step_ahead", "what fits now grows: the newest are thrown out, and their work is lost",
         {"horizon = max([left for _, left in running + waiting], default=0) + 1": "horizon = 2"}),
        ("longest_output_first", "few requests finish when the longest go first",
         {"key=lambda i: waiting": "key=lambda i: -waiting"}),
    ],
}  # fmt: skip

# Other ways to be right, which the checks must accept.
ALSO_RIGHT = {
    "4.2": [
        {"[self._free.pop() for _ in range(num)]": "self._free[len(self._free) - num :]\n"
         "        del self._free[len(self._free) - num :]"},
        {"list(range(num_pages))": "set(range(num_pages))", "self._free.append(page)": "self._free.add(page)",
         "[0] * num_pages": "dict.fromkeys(range(num_pages), 0)"},
    ],
    "4.4": [
        {"taken = allocator.take((num_branches - 1) * is_partial)\n    if taken is None:\n        return None\n":
         "taken = []\n    for _ in range((num_branches - 1) * is_partial):\n        new = allocator.take(1)\n"
         "        if new is None:\n            allocator.release(taken)\n            return None\n"
         "        taken += new\n"},
    ],
    "4.5": [
        {"torch.tensor(page_table[: math.ceil(num_tokens / page_size)])": "torch.tensor(page_table)"},
    ],
}  # fmt: skip
