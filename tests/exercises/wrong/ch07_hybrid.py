"""Usual mistakes in chapter 7: {exercise: [(name, what to tell who made it, {words of the solution: wrong words})]}."""

WRONG = {
    "7.1": [
        ("the_kv_hit", "the pages say how much attention knows; the other layers go on from a state, or from nothing",
         {"return max((count for count in snapshots if count <= deepest), default=0)": "return deepest"}),
        ("equal_to_the_length", "then its last token is in the state already, and must be run all the same: twice",
         {"min(page_hit, num_tokens - 1)": "min(page_hit, num_tokens)"}),
        ("a_snapshot_past_the_kv", "from the end of the page hit on, that state has seen somebody else's tokens",
         {"min(page_hit, num_tokens - 1)": "num_tokens - 1"}),
        ("the_deepest_or_none", "if the deepest state is past the hit, an earlier one may do",
         {"return max((count for count in snapshots if count <= deepest), default=0)":
          "return snapshots[-1] if snapshots and snapshots[-1] <= deepest else 0"}),
        ("the_first_snapshot", "each token between two states is run again: go on from the deepest",
         {"max((": "min(("}),
        ("cut_like_pages", "a state cannot be cut: one that has seen 24 tokens is none of 20",
         {"return max((count for count in snapshots if count <= deepest), default=0)":
          "return min(max(snapshots, default=0), deepest)"}),
    ],
    "7.2": [
        ("rounds_up", "a boundary past the last token is one that this prompt never reaches",
         {"(num_tokens - 1) // page_size * page_size": "-(-num_tokens // page_size) * page_size"}),
        ("at_the_prompts_end", "the same prompt must run its last token again, so it cannot use a state at its end",
         {"(num_tokens - 1) // page_size * page_size": "num_tokens // page_size * page_size"}),
        ("counted_from_the_start", "others begin elsewhere: only multiples counted from 0 are the same for all",
         {"if count % every == 0": "if (count - start) % every == 0"}),
        ("start_ignored_too", "the prefill goes on from start: it does not come by earlier counts",
         {"range(start + 1, num_tokens + 1)": "range(1, num_tokens + 1)", "if boundary > start": "if boundary"}),
        ("no_last_boundary", "the same prompt again would run all tokens since the last multiple",
         {"        counts.add(boundary)": "        pass"}),
        ("only_the_last_boundary", "a prompt that leaves this one earlier would find no state at all",
         {"{count for count in range(start + 1, num_tokens + 1) if count % every == 0}": "set()"}),
        ("the_end_left_out", "a longer prompt that begins with this one can use a state at its end",
         {"range(start + 1, num_tokens + 1)": "range(start + 1, num_tokens)"}),
        ("both_are_listed", "a boundary may be a multiple as well: its state is kept once",
         {"sorted(counts)": "sorted([*(counts - {boundary}), *[boundary] * (1 + (boundary % every == 0))])"
          " if boundary > start else sorted(counts)"}),
        ("every_boundary", "a state costs as much as many pages: not one for each page",
         {"if count % every == 0": "if count % every == 0 or count % page_size == 0"}),
    ],
    "7.3": [
        ("refreshes_ancestors", "one state was used; to refresh those on the way keeps what nobody uses, and others go",
         {"                self.put(tokens[:count])":
          "                for at in range(1, count + 1):\n                    if tokens[:at] in self._used:\n"
          "                        self.put(tokens[:at])"}),
        ("same_recency_as_pages", "of pages only the last on a way can go; a state needs none of those before it",
         {"del self._used[next(iter(self._used))]":
          "del self._used[next(one for one in self._used"
          " if not any(two != one and two[: len(one)] == one for two in self._used))]"}),
        ("a_hit_is_no_use", "what is hit again and again would go first: it is the oldest",
         {"                self.put(tokens[:count])\n": ""}),
        ("skips_all_tokens", "a request must run its last token: a state that has seen that is no use to it",
         {"range(len(tokens) - 1, 0, -1)": "range(len(tokens), 0, -1)"}),
        ("the_shortest", "every token up to the longest is one less to run",
         {"range(len(tokens) - 1, 0, -1)": "range(1, len(tokens))"}),
        ("cut_where_they_part", "a state holds all of its tokens: it is of use only to who begins with all of them",
         {"            if tokens[:count] in self._used:\n                self.put(tokens[:count])\n":
          "            found = [one for one in self._used if one[:count] == tokens[:count]]\n"
          "            if found:\n                self.put(found[0])\n"}),
        ("makes_room_for_what_is_there", "what is kept already needs no slot: nothing has to go",
         {"        self._used.pop(tokens, None)\n        if len(self._used) == self.num_slots:\n"
          "            del self._used[next(iter(self._used))]":
          "        if len(self._used) == self.num_slots:\n            del self._used[next(iter(self._used))]\n"
          "        self._used.pop(tokens, None)"}),
        ("put_again_is_no_use", "who computes it again has a use for it: it becomes the most recent",
         {"        self._used.pop(tokens, None)\n": "        if tokens in self._used:\n            return\n"}),
        ("the_newest_goes", "the least recently used one goes, which is the first in order",
         {"next(iter(self._used))": "list(self._used)[-1]"}),
    ],
    "7.4": [
        ("a_slot_forgotten", "when there are no pages, the slot has been taken already: it would never come back",
         {"        undo.callback(states.release, slot)\n": ""}),
        ("undo_in_the_wrong_order", "the last taken first: unlocked, the node may be evicted while you still use it",
         {"        undo.callback(tree.unlock, node)\n": "",
          "        undo.callback(allocator.release, pages)\n":
          "        undo.callback(allocator.release, pages)\n        undo.callback(tree.unlock, node)\n"}),
        ("frees_what_the_tree_owns", "give back the reference that you added; the tree's own is not yours to give",
         {"        allocator.share(pages)\n": ""}),
        ("the_lock_stays", "a node that is locked for nobody can never be evicted",
         {"        undo.callback(tree.unlock, node)\n": ""}),
        ("pages_stay_shared", "a page with one reference too many never becomes free",
         {"        undo.callback(allocator.release, pages)\n": ""}),
        ("slot_0_is_falsy", "0 is a slot like any other: test for None, not for falsehood",
         {"if slot is None": "if not slot"}),
        ("no_new_pages_is_none", "take(0) gives an empty list, which is what was asked for, not a refusal",
         {"if new is None": "if not new"}),
        ("undone_though_all_is_well", "what the request goes away with must not be given back",
         {"        undo.pop_all()  # all is there: nothing is to be undone any more\n": ""}),
        ("what_raises_is_not_undone", "a call that raises leaves you with what was taken before it: give it back",
         {"    with ExitStack() as undo:\n        tree.lock(node)\n        undo.callback(tree.unlock, node)\n":
          "    undo = ExitStack()\n    if True:\n        tree.lock(node)\n        undo.callback(tree.unlock, node)\n",
          "        if slot is None:\n            return None\n":
          "        if slot is None:\n            undo.close()\n            return None\n",
          "        if new is None:\n            return None\n":
          "        if new is None:\n            undo.close()\n            return None\n"}),
        ("noted_before_it_is_done", "what raises has taken nothing: note how to undo it when it is done",
         {"        tree.lock(node)\n        undo.callback(tree.unlock, node)\n":
          "        undo.callback(tree.unlock, node)\n        tree.lock(node)\n",
          "        allocator.share(pages)\n        undo.callback(allocator.release, pages)\n":
          "        undo.callback(allocator.release, pages)\n        allocator.share(pages)\n"}),
        ("written_into_the_trees_list", "the list may be the tree's own: make a new one",
         {"        return pages + new, slot": "        pages += new\n        return pages, slot"}),
    ],
    "7.5": [
        ("kv_of_all_layers", "only the attention layers keep keys and values",
         {"model.attention_layers * model.kv_bytes":
          "(model.attention_layers + model.deltanet_layers) * model.kv_bytes"}),
        ("states_of_all_layers", "only the DeltaNet layers have a state",
         {"model.deltanet_layers * model.state_bytes":
          "(model.attention_layers + model.deltanet_layers) * model.state_bytes"}),
        ("ignores_spacing", "a snapshot stands for all tokens since the last one",
         {"(every * token_bytes)": "token_bytes", "snapshot_bytes / every)": "snapshot_bytes)"}),
        ("gib_for_gb_of_memory", "1 GB is 10^9 bytes; 2^30 are a GiB",
         {"snapshot_bytes / 1e9": "snapshot_bytes / 2**30", "memory_gb * 1e9": "memory_gb * 2**30"}),
        ("snapshots_for_nothing", "each token brings its share of a snapshot into the memory",
         {"(token_bytes + snapshot_bytes / every)": "token_bytes"}),
        ("pages_for_nothing", "the tokens' keys and values need memory as well",
         {"(token_bytes + snapshot_bytes / every)": "(snapshot_bytes / every)"}),
        ("ratio_upside_down", "how many times the keys and values, not what share of the snapshot",
         {"snapshot_bytes / (every * token_bytes)": "every * token_bytes / snapshot_bytes"}),
        ("one_layer_of_each", "each layer of its kind has keys and values, or a state, of its own",
         {"model.deltanet_layers * model.state_bytes": "model.state_bytes",
          "model.attention_layers * model.kv_bytes": "model.kv_bytes"}),
    ],
    "7.6": [
        ("least_recently_used", "a state of a chat that went on is kept as long as one that its user will come back to",
         {"key=lambda i: worth(kept[i])": "key=lambda i: kept[i].used_s"}),
        ("most_recently_used", "the newest are those that somebody is about to come back to",
         {"key=lambda i: worth(kept[i])": "key=lambda i: -kept[i].used_s"}),
        ("fewest_tokens", "a long prompt saves more, but a user who does not come back saves nothing",
         {" / (100 + now_s - one.used_s) ** 2": ""}),
        ("old_turns_kept", "a chat goes on from its last state: those of the turns before it are no use",
         {"            return 0.0  # the chat went on from here already\n": "            pass\n"}),
        ("the_first_one_in", "who came first may be the one who comes back soonest",
         {"min(range(len(kept)), key=lambda i: worth(kept[i]))": "0"}),
    ],
}  # fmt: skip

# Other ways to be right, which the checks must accept.
ALSO_RIGHT = {
    "7.1": [
        {"    deepest = min(page_hit, num_tokens - 1)\n"
         "    return max((count for count in snapshots if count <= deepest), default=0)":
         "    skipped = 0\n    for count in snapshots:\n        if count <= page_hit and count < num_tokens:\n"
         "            skipped = count\n    return skipped"},
    ],
    "7.3": [
        {"        self.num_slots = num_slots\n        self._used = {}":
         "        self.num_slots, self._order = num_slots, []",
         "        return list(self._used)": "        return self._order",
         "        self._used.pop(tokens, None)\n        if len(self._used) == self.num_slots:\n"
         "            del self._used[next(iter(self._used))]\n        self._used[tokens] = None":
         "        rest = [one for one in self._order if one != tokens]\n"
         "        self._order = rest[int(len(rest) == self.num_slots) :] + [tokens]",
         "if tokens[:count] in self._used": "if tokens[:count] in self._order"},
    ],
    "7.4": [
        {"    with ExitStack() as undo:\n        tree.lock(node)\n        undo.callback(tree.unlock, node)\n":
         "    with ExitStack() as undo:\n        tree.lock(node)\n        undo.callback(lambda: tree.unlock(node))\n"},
    ],
}  # fmt: skip
