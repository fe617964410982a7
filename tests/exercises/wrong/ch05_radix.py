"""Usual mistakes in chapter 5: {exercise: [(name, what to tell who made it, {words of the solution: wrong words})]}."""

WRONG = {
    "5.1": [
        ("whole_prompt_found", "nothing would be left to run, and so no logits: the last token is always computed",
         {"return found[: len(tokens) - 1]\n            found": "return found\n            found",
          "    return found[: len(tokens) - 1]\n    #": "    return found\n    #"}),
        ("whole_node_for_its_beginning", "a node may agree with the prompt in its first tokens only: compare each",
         {"len(found) == len(tokens) or tokens[len(found)] != token": "len(found) == len(tokens)"}),
        ("whole_node_or_nothing", "the first tokens of a node are of use too, when the rest differs",
         {"                return found[: len(tokens) - 1]\n            found":
          "                return [s for s in found if s not in node.slots][: len(tokens) - 1]\n            found"}),
        ("salt_ignored", "a salt keeps users apart: look in its own tree alone",
         {"roots.get(salt)": "next(iter(roots.values()), None)"}),
        ("salt_or_the_plain_tree", "a salt that is new has nothing cached: another salt's tokens are not for it",
         {"roots.get(salt)": "roots.get(salt, next(iter(roots.values()), None))"}),
        ("first_node_only", "what follows a node is in its children",
         {"len(found) < len(tokens):": "not found:"}),
    ],
    "5.2": [
        ("duplicates_lost", "the tree keeps its own slots, so the request's copies are to be given back",
         {"                copies.append(slots[at + common])": "                pass"}),
        ("shared_slots_given_back", "where the request found its beginning in the tree, the slots are the tree's own",
         {"if child.slots[common] != slots[at + common]": "if True"}),
        ("last_writer_wins", "others read the tree's slots: those stay, and the newcomer's copies go",
         {"copies.append(slots[at + common])": "copies.append(child.slots[common])\n"
          "                child.slots[common] = slots[at + common]"}),
        ("kept_before_it_ran", "a slot whose token has not run holds nothing: whoever found it would read that",
         {"    node, at, copies": "    num_computed = len(tokens)\n    node, at, copies"}),
        ("no_split", "who goes another way than a node's rest must not hang below that rest",
         {"common < len(child.tokens):\n            rest": "False:\n            rest"}),
        ("children_lost", "the old rest keeps the node's children",
         {"child.slots[common:], child.children)": "child.slots[common:])"}),
        ("children_stay_above", "the children came after the old rest, not after the common tokens",
         {"child.slots[common:], child.children)": "child.slots[common:])",
          "child.children = {rest.tokens[0]: rest}": "child.children = {**child.children, rest.tokens[0]: rest}"}),
        ("slots_not_split", "the slots are divided where the tokens are",
         {"child.slots[common:], child.children": "child.slots, child.children"}),
    ],
    "5.4": [
        ("plain_mean", "the two parts seldom stand for the same weight: that is what lse says",
         {"torch.exp(shared_lse - lse)[..., None] * shared_out": "0.5 * shared_out",
          "torch.exp(own_lse - lse)[..., None] * own_out": "0.5 * own_out"}),
        ("lse_swapped", "each part is weighed by its own lse",
         {"torch.exp(shared_lse - lse)[..., None] * shared_out": "torch.exp(own_lse - lse)[..., None] * shared_out",
          "torch.exp(own_lse - lse)[..., None] * own_out": "torch.exp(shared_lse - lse)[..., None] * own_out"}),
        ("weighed_by_keys", "a part's weight is the sum of e^score over its keys, not their number",
         {"    return out, lse\n": "    num = torch.tensor([b - a for a, b in zip(starts, starts[1:])])[:, None, None]\n"
          "    return (len(k_prefix) * shared_out + num * own_out) / (len(k_prefix) + num), lse\n"}),
        ("sees_other_requests", "k and v of others are not for this request: cut at starts",
         {"attend(q[r : r + 1], k[a:b], v[a:b])": "attend(q[r : r + 1], k, v)"}),
        ("prefix_left_out", "the shared keys belong to everybody",
         {"    return out, lse\n": "    return own_out, own_lse\n"}),
        ("nothing_of_nothing", "a softmax over no key at all is NaN or an error: such a part has out 0 and lse -inf",
         {"            return torch.zeros_like(queries), lse": "            return queries / 0.0 * 0.0, lse"}),
        ("lse_added", "the sums of e^score add up, not their logarithms",
         {"torch.logaddexp(shared_lse, own_lse)": "shared_lse + own_lse"}),
        ("prefix_scores_not_scaled", "scores are scaled by dim ** -0.5", {"q.shape[-1] ** -0.5": "1.0"}),
        ("prefix_kv_heads_in_turn", "neighbouring heads share a KV head: 0 0 1 1, not 0 1 0 1",
         {"keys.repeat_interleave(share, dim=1)": "keys.repeat(1, share, 1)",
          "values.repeat_interleave(share, dim=1)": "values.repeat(1, share, 1)"}),
    ],
    "5.5": [
        ("shortest_match_first", "who finds most goes first",
         {"chosen = max(left,": "chosen = min(left,"}),
        ("starves", "while newcomers find more than somebody, he would wait for ever",
         {"if now_s - waiting[chosen][0] <= max_wait_s": "if True"}),
        ("ignores_the_batch", "whoever runs leaves its prompt in the cache: those behind it find that too",
         {"        kept.append(waiting[chosen][1])\n": ""}),
        ("arrival_order", "the cache does not matter so", {"<= max_wait_s": "< 0"}),
        ("all_late_if_one_is", "one who has waited too long goes first, and then it is as before",
         {"        if now_s - waiting[chosen][0] <= max_wait_s:":
          "        if now_s - min(arrived_s for arrived_s, _ in waiting) <= max_wait_s:"}),
        ("tokens_in_any_place", "only a common beginning can be found in a cache",
         {"            while num < min(len(tokens), len(other)) and tokens[num] == other[num]:\n                num += 1\n":
          "            num = len({*tokens} & {*other})\n"}),
        ("equals_by_position", "of those who find equally much, the one that waits longest",
         {"left = sorted(range(len(waiting)), key=lambda i: waiting[i][0])": "left = list(range(len(waiting)))",
          "chosen = left[0]": "chosen = min(left, key=lambda i: waiting[i][0])"}),
    ],
    "5.6": [
        ("output_counted", "output costs the same either way: it is no part of the input's bill",
         {"plain = price.input * (prefix_tokens + tokens)":
          "plain = price.input * (prefix_tokens + tokens) + price.output * output_tokens",
          "first = price.write * prefix_tokens + price.input * tokens":
          "first = price.write * prefix_tokens + price.input * tokens + price.output * output_tokens",
          "later = price.hit * prefix_tokens + price.input * tokens":
          "later = price.hit * prefix_tokens + price.input * tokens + price.output * output_tokens"}),
        ("write_premium_left_out", "what is put into the cache costs `write`, which may be more than `input`",
         {"price.write * prefix_tokens": "price.input * prefix_tokens"}),
        ("first_miss_ignored", "the first request finds nothing: it writes",
         {"price.write * prefix_tokens": "price.hit * prefix_tokens"}),
        ("written_every_time", "the prefix is written once, all later requests find it",
         {"later = price.hit * prefix_tokens": "later = price.write * prefix_tokens"}),
        ("further_input_free", "what comes behind the prefix is paid in full by each request",
         {"first = price.write * prefix_tokens + price.input * tokens": "first = price.write * prefix_tokens",
          "later = price.hit * prefix_tokens + price.input * tokens": "later = price.hit * prefix_tokens"}),
        ("further_input_found", "what comes behind the prefix is new in each request",
         {"later = price.hit * prefix_tokens + price.input * tokens": "later = price.hit * (prefix_tokens + tokens)"}),
        ("share_of_the_prefix", "the bill is that of all input, not of the prefix alone",
         {"allowed = (1 - saved) * plain":
          "allowed = (1 - saved) * price.input * prefix_tokens + price.input * tokens"}),
        ("one_request_too_few", "requests come whole: with fewer than this number not enough is saved",
         {"math.ceil((first - later) / (allowed - later) - 1e-9)": "int((first - later) / (allowed - later))"}),
    ],
    "5.7": [
        ("oldest_first", "least recently used: a document that is read once drives out three chats",
         {"leaves[i][0] * leaves[i][3]": "leaves[i][3]"}),
        ("largest_first", "a long answer of a chat that is going on goes before a short one that has ended",
         {"leaves[i][0] * leaves[i][3]": "leaves[i][0]"}),
        ("least_used_first", "a leaf is new, so nearly all were used once",
         {"leaves[i][0] * leaves[i][3]": "-leaves[i][2]"}),
        ("newest_first", "what came last is what comes back soonest",
         {"leaves[i][0] * leaves[i][3]": "-leaves[i][3]"}),
    ],
}  # fmt: skip

# Other ways to be right, which the checks must accept.
ALSO_RIGHT = {
    "5.2": [
        {"common < len(child.tokens):\n            rest":
         "common < len(child.tokens) and at + common < num_computed:\n            rest"},
    ],
    "5.5": [
        {"        if now_s - waiting[chosen][0] <= max_wait_s:\n":
         "        if not now_s - waiting[chosen][0] > max_wait_s:\n"},
    ],
}  # fmt: skip
