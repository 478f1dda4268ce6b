"""The block manager, a plain twin that decides the same, and a memory that is a dict.

Each sequence is a list of tokens. Whatever is read back through a table is what was written through
it, whatever was shared, evicted, swapped or refused in between.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from blockmanager import (
    BlockCopy,
    BlockManager,
    BlockTransfer,
    Content,
    HashedContent,
    NoFreeBlocksError,
    TokenContent,
)
from blockmanager.content import HashFunction, sha256
from tests.blocks.helpers import (
    EXTRA_KEYS,
    Memory,
    PlainManager,
    PlainTable,
    kv_values,
    state_of,
)


class Form(NamedTuple):
    """What is known of a prompt, and how."""

    kind: str
    hash_block_size: int
    num_unknown: int
    """Tokens at its end whose identity nobody knows."""
    root: int
    """Index into ``EXTRA_KEYS``."""


UNKNOWN = Form("unknown", 1, 0, 0)


class Prompt(NamedTuple):
    """A prompt that goes on as an earlier one began: ``like`` picks it, ``keep`` tokens of it."""

    like: int
    keep: int
    tail: list[int]
    form: Form | None
    """``None``: that of the earlier one."""


FORMS = st.builds(
    Form,
    kind=st.sampled_from(["tokens", "tokens", "tokens", "hashed", "hashed", "unknown"]),
    hash_block_size=st.integers(1, 5),
    num_unknown=st.sampled_from([0, 0, 0, 1, 4]),
    root=st.integers(0, 3),
)
PROMPTS = st.builds(
    Prompt,
    like=st.integers(0, 7),
    keep=st.integers(0, 12),
    tail=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    form=st.none() | FORMS,
)
INDEX = st.integers(0, 7)
MORE = st.lists(st.integers(0, 2), min_size=1, max_size=6)
"""Output tokens that become known and are written together."""


def hash_ids(tokens: list[int], hash_block_size: int) -> list[int]:
    """An id for each group of tokens, equal exactly for equal groups (they are digits 0..2)."""
    groups = (tokens[i : i + hash_block_size] for i in range(0, len(tokens), hash_block_size))
    return [int("1" + "".join(map(str, group)), 4) for group in groups]


class Line:
    """A sequence of the model: known tokens, how many of them are written, a table in each twin."""

    def __init__(self, tokens: list[int], form: Form, caching: bool, block_size: int) -> None:
        self.tokens = tokens
        self.num_computed = 0
        self.form = form
        self._caching = caching
        self._block_size = block_size
        num_known = max(0, len(tokens) - form.num_unknown)
        self._num_known: int | None = num_known  # None: every token, outputs included
        self.content: Content | None = None
        if form.kind == "tokens":
            self.content = TokenContent.of(tokens[:num_known])
            if num_known == len(tokens):
                self._num_known = None
        elif form.kind == "hashed":
            ids = hash_ids(tokens[:num_known], form.hash_block_size)
            self.content = HashedContent(np.array(ids, np.int64), form.hash_block_size, num_known)
        else:
            self._num_known = 0
        self.plain = PlainTable(self.names)

    def adopt(self, manager: BlockManager) -> None:
        self.table = manager.new_table(self.content, len(self.tokens), EXTRA_KEYS[self.form.root])

    @property
    def num_known(self) -> int:
        return len(self.tokens) if self._num_known is None else self._num_known

    def names(self) -> list[Hashable]:
        if not self._caching:
            return []
        size = self._block_size
        ends = range(size, self.num_known + 1, size)
        if self.form.kind == "tokens":
            return [(self.form.root, tuple(self.tokens[:end])) for end in ends]
        # An id tells nothing of the parts of its group: a block is named by whole groups.
        group = self.form.hash_block_size
        covered = [min(-(-end // group) * group, self.num_known) for end in ends]
        return [
            (self.form.root, group, end, tuple(self.tokens[:cover]))
            for end, cover in zip(ends, covered, strict=True)
        ]

    def learn(self, tokens: list[int]) -> None:
        """Output tokens were sampled: they are known before they are written."""
        for token in tokens:
            self.tokens.append(token)
            if self.table.keys is not None:
                self.table.keys.append(token)

    def values(self) -> list[int]:
        return kv_values(self.form.root, self.tokens)[: self.num_computed]


class Grant(NamedTuple):
    """Writes due at the end of a step, and what dropping them needs."""

    start: int
    end: int
    copies: list[BlockCopy]
    registered_before: int


class BlockManagerMachine(RuleBasedStateMachine):
    with_plain_twin = True
    """Off: the memory alone has to notice what is wrong."""
    hash_function: HashFunction = staticmethod(sha256)

    @initialize(
        num_blocks=st.integers(4, 12) | st.integers(9, 12),
        block_size=st.integers(1, 4),
        num_swap_blocks=st.integers(0, 6),
        watermark_blocks=st.sampled_from([0, 0, 1, 2]),
        caching=st.sampled_from([True, True, True, True, True, False]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        num_swap_blocks: int,
        watermark_blocks: int,
        caching: bool,
    ) -> None:
        self.manager = BlockManager(
            num_blocks,
            block_size,
            enable_prefix_caching=caching,
            watermark_blocks=watermark_blocks,
            num_swap_blocks=num_swap_blocks,
            hash_function=self.hash_function,
        )
        self.plain = PlainManager(num_blocks, block_size, watermark_blocks, num_swap_blocks)
        self.memory = Memory(block_size)
        self.waiting: list[Line] = []
        self.running: list[Line] = []
        self.swapped: list[Line] = []
        self.past: list[tuple[list[int], Form]] = [([], Form("tokens", 1, 0, 0))]
        # What the backend is told at the end of a step.
        self.grants: dict[Line, Grant] = {}
        self.outgoing: list[BlockTransfer] = []
        self.incoming: list[BlockTransfer] = []

    # -- asking both twins -------------------------------------------------------------------

    @property
    def lines(self) -> list[Line]:
        return [*self.waiting, *self.running, *self.swapped]

    def state(self) -> Any:
        return state_of([self.manager, [line.table for line in self.lines]])

    def ask(self, name: str, line: Line, *args: Any, **options: Any) -> Any:
        """The manager's answer, which is the plain twin's too; a refusal has changed nothing."""
        before = self.state()
        try:
            answer = getattr(self.manager, name)(line.table, *args, **options)
        except (NoFreeBlocksError, LookupError) as error:
            raise AssertionError(f"{name} has no answer: {error!r}") from error
        if answer is None and name not in ("register", "unregister", "free"):
            assert self.state() == before, f"a refused {name} changed something"
        if name in ("find_hit", "blocks_to_grow"):
            assert self.state() == before, f"{name} changed something"
        if self.with_plain_twin:
            expected = getattr(self.plain, name)(line.plain, *args, **options)
            assert answer == expected, f"{name} gives {answer}, expected {expected}"
        return answer

    # -- what a scheduler does ---------------------------------------------------------------

    def admit(self, line: Line, chunk: int, use_watermark: bool) -> bool:
        size = self.manager.block_size
        hit = self.ask("find_hit", line, len(line.tokens))
        num_hit = len(hit) * size
        assert num_hit < len(line.tokens), "nothing is left to compute"
        end = min(num_hit + 1 + chunk, len(line.tokens))
        fits = self.manager.fits(end, hit, use_watermark=use_watermark)
        new_blocks = self.ask("admit", line, hit, end, use_watermark=use_watermark)
        assert fits == (new_blocks is not None), "fits() and admit() disagree"
        if new_blocks is None:
            return False
        self.grants[line] = Grant(num_hit, end, [], len(hit))
        self.waiting.remove(line)
        self.running.append(line)
        return True

    def grow(self, line: Line, start: int, end: int) -> bool:
        free, need = self.manager.num_free, self.manager.blocks_to_grow(line.table, start, end)
        registered_before = line.table.num_registered
        growth = self.ask("grow", line, start, end)
        assert (growth is None) == (need > free), f"needs {need} of {free}, gets {growth}"
        if growth is None:
            return False
        assert len(growth.new_blocks) + len(growth.copies) == need
        self.grants[line] = Grant(start, end, growth.copies, registered_before)
        return True

    def swap_in(self, line: Line, end: int, use_watermark: bool) -> bool:
        moved = self.ask("swap_in", line, end, use_watermark=use_watermark)
        if moved is None:
            return False
        self.incoming += moved[0]
        self.grants[line] = Grant(line.num_computed, end, [], 0)
        self.swapped.remove(line)
        self.running.append(line)
        return True

    def preempt(self, line: Line, swap: bool) -> None:
        """Its blocks are taken; a grant of this step is dropped as if it had never been."""
        self.running.remove(line)
        grant = self.grants.pop(line, None)
        if grant is not None:
            self.ask("unregister", line, grant.registered_before)
        elif swap and (moved := self.ask("swap_out", line)) is not None:
            self.outgoing += moved
            self.swapped.append(line)
            return
        self.ask("free", line)
        line.num_computed = 0
        self.waiting.append(line)

    def register_grant(self, line: Line) -> None:
        self.ask("register", line, self.grants[line].end)

    def execute(self) -> None:
        """What a backend does, in the documented order."""
        self.memory.swap_out(self.outgoing)
        self.memory.swap_in(self.incoming)
        for grant in self.grants.values():
            self.memory.copy(grant.copies)
        for line, grant in self.grants.items():
            slots = line.table.slot_mapping(grant.start, grant.end, self.memory.block_size)
            values = kv_values(line.form.root, line.tokens)[grant.start : grant.end]
            self.memory.write(slots, values)
            line.num_computed = grant.end
        self.grants, self.outgoing, self.incoming = {}, [], []

    # -- rules -------------------------------------------------------------------------------

    def pick(self, lines: list[Line], index: int) -> Line:
        return lines[index % len(lines)]

    def arrive(self, prompt: Prompt) -> Line:
        tokens, form = self.past[prompt.like % len(self.past)]
        line = Line(
            [*tokens[: prompt.keep], *prompt.tail],
            prompt.form or form,
            self.manager.enable_prefix_caching,
            self.manager.block_size,
        )
        line.adopt(self.manager)
        self.past.append((list(line.tokens), line.form))
        self.waiting.append(line)
        return line

    @rule(
        prompt=PROMPTS, chunk=st.integers(0, 12), use_watermark=st.booleans(), keyed=st.booleans()
    )
    def allocate(self, prompt: Prompt, chunk: int, use_watermark: bool, keyed: bool) -> None:
        """A new prompt, its first chunk; registered now, or by a later ``register``."""
        line = self.arrive(prompt)
        if not self.admit(line, chunk, use_watermark):
            self.waiting.remove(line)
            return
        if keyed:
            self.register_grant(line)
        self.execute()

    @precondition(lambda self: self.waiting)
    @rule(index=INDEX, chunk=st.integers(0, 12), use_watermark=st.booleans())
    def resume(self, index: int, chunk: int, use_watermark: bool) -> None:
        """A preempted sequence finds again what nobody took, outputs included."""
        line = self.pick(self.waiting, index)
        if self.admit(line, chunk, use_watermark):
            self.register_grant(line)
            self.execute()

    @precondition(lambda self: self.running)
    @rule(index=INDEX, count=st.integers(1, 6), more=MORE, keyed=st.booleans())
    def append(self, index: int, count: int, more: list[int], keyed: bool) -> None:
        """Write the next known tokens (rest of a prompt, outputs), through copy-on-write."""
        line = self.pick(self.running, index)
        line.learn(more)
        end = min(line.num_computed + count, len(line.tokens))
        if end == line.num_computed or not self.grow(line, line.num_computed, end):
            return
        if keyed:
            self.register_grant(line)
        self.execute()

    @precondition(lambda self: self.running)
    @rule(index=INDEX, back=st.integers(1, 8), more=st.lists(st.integers(0, 2), max_size=4))
    def rewrite(self, index: int, back: int, more: list[int]) -> None:
        """Take back written tokens and write others, in several blocks at once if need be.

        Only behind the content that block keys name.
        """
        line = self.pick(self.running, index)
        start = max(line.num_known, line.num_computed - back)
        if line.num_computed < len(line.tokens) or start >= line.num_computed:
            return
        kept, changed = line.tokens[:start], [(t + 1) % 3 for t in line.tokens[start:]]
        if self.grow(line, start, len(line.tokens) + len(more)):
            line.tokens[:] = [*kept, *changed, *more]
            self.execute()

    @precondition(lambda self: len(self.running) > 1)
    @rule(more=st.lists(MORE, min_size=2, max_size=5))
    def extend(self, more: list[list[int]]) -> None:
        """Many tables at once give what ``grow`` of each in turn would."""
        lines = []
        counts = []
        for line, tokens in zip(self.running, more, strict=False):
            line.learn(tokens)
            table, end = line.table, len(line.tokens)
            need = self.manager.blocks_to_grow(table, line.num_computed, end)
            missing = max(0, self.manager.blocks_for(end) - len(table))
            if end > line.num_computed and need == missing:
                lines.append(line)
                counts.append(missing)
        before = self.state()
        try:
            answer = self.manager.extend([line.table for line in lines], counts)
        except NoFreeBlocksError:
            assert sum(counts) > self.manager.num_free
            assert self.state() == before, "a refused extend changed something"
            return
        for line, new_blocks in zip(lines, answer, strict=True):
            start, end = line.num_computed, len(line.tokens)
            if self.with_plain_twin:
                expected = self.plain.grow(line.plain, start, end)
                assert expected == (new_blocks, []), f"extend gives {new_blocks}, not {expected}"
            self.grants[line] = Grant(start, end, [], line.table.num_registered)
        self.execute()

    def split(self, parent: Line) -> Line:
        child = object.__new__(Line)
        child.__dict__.update(parent.__dict__)
        child.tokens = list(parent.tokens)
        child.table = self.manager.fork(parent.table)
        child.plain = PlainTable(child.names)
        if self.with_plain_twin:
            self.plain.fork(parent.plain, child.plain)
        self.running.append(child)
        return child

    @precondition(lambda self: 0 < len(self.running) < 8)
    @rule(index=INDEX)
    def fork(self, index: int) -> None:
        self.split(self.pick(self.running, index))

    @precondition(lambda self: 0 < len(self.running) < 8)
    @rule(index=INDEX, more=st.tuples(MORE, MORE), parent_first=st.booleans())
    def branch(self, index: int, more: tuple[list[int], list[int]], parent_first: bool) -> None:
        """Parallel samples: both go on from one past, in one step."""
        parent = self.pick(self.running, index)
        family = [parent, self.split(parent)]
        if not parent_first:
            family.reverse()
        for line, tokens in zip(family, more, strict=True):
            line.learn(tokens)
            if self.grow(line, line.num_computed, len(line.tokens)):
                self.register_grant(line)
        self.execute()

    @precondition(lambda self: len(self.lines) > 1)
    @rule(index=INDEX)
    def free(self, index: int) -> None:
        line = self.pick(self.lines, index)
        self.ask("free", line)
        for queue in (self.waiting, self.running, self.swapped):
            if line in queue:
                queue.remove(line)

    @precondition(lambda self: len(self.running) > 1)
    @rule(index=INDEX)
    def throw_away(self, index: int) -> None:
        """Preemption by recompute."""
        self.preempt(self.pick(self.running, index), swap=False)

    @precondition(lambda self: self.running and self.manager.host_pool is not None)
    @rule(index=INDEX)
    def swap_out(self, index: int) -> None:
        line = self.pick(self.running, index)
        moved = self.ask("swap_out", line)
        if moved is not None:
            self.outgoing += moved
            self.running.remove(line)
            self.swapped.append(line)
            self.execute()

    @precondition(lambda self: self.swapped)
    @rule(index=INDEX, count=st.integers(0, 6), use_watermark=st.booleans())
    def swap_back(self, index: int, count: int, use_watermark: bool) -> None:
        line = self.pick(self.swapped, index)
        end = min(line.num_computed + count, len(line.tokens))
        if self.swap_in(line, end, use_watermark):
            self.register_grant(line)
            self.execute()

    @precondition(lambda self: self.running)
    @rule(index=INDEX)
    def register(self, index: int) -> None:
        line = self.pick(self.running, index)
        self.ask("register", line, line.num_computed)

    @precondition(lambda self: self.running)
    @rule(index=INDEX, level=st.integers(0, 3))
    def unregister(self, index: int, level: int) -> None:
        line = self.pick(self.running, index)
        self.ask("unregister", line, level)

    @precondition(
        lambda self: any(b in self.manager.pool.cache for b in self.manager.pool.free_ids())
    )
    @rule(count=st.integers(1, 12))
    def evict(self, count: int) -> None:
        """Pressure: somebody unknown takes ``count`` of the free blocks, writes them and goes."""
        count = min(count, self.manager.num_free)
        tokens = [9] * (count * self.manager.block_size)
        line = Line(tokens, UNKNOWN, True, self.manager.block_size)
        line.adopt(self.manager)
        self.waiting.append(line)
        assert self.admit(line, len(tokens), use_watermark=False)
        self.execute()
        self.free(self.lines.index(line))

    @rule(
        counts=st.lists(st.integers(1, 5), min_size=8, max_size=8),
        swap=st.booleans(),
        prompts=st.lists(PROMPTS, max_size=2),
    )
    def whole_step(self, counts: list[int], swap: bool, prompts: list[Prompt]) -> None:
        """Many decisions before the backend moves anything: growth with preemptions, or with
        admissions that hit what the same step writes."""
        preempted = False
        position = 0
        while position < len(self.running):
            line = self.running[position]
            line.learn([counts[position % 8] % 3])
            start = line.num_computed
            end = min(start + counts[position % 8], len(line.tokens))
            while not self.grow(line, start, end):
                preempted = True
                victim = self.running[-1]
                self.preempt(victim, swap)
                if victim is line:
                    break
            else:
                self.register_grant(line)
            position += 1
        if not preempted:
            for line in list(self.swapped):
                if not self.swap_in(line, line.num_computed, use_watermark=bool(self.running)):
                    break
                self.register_grant(line)
            for prompt in prompts:
                line = self.arrive(prompt)
                if self.admit(line, 12, use_watermark=bool(self.running)):
                    self.register_grant(line)
                else:
                    self.waiting.remove(line)
        self.execute()

    # -- what always holds -------------------------------------------------------------------

    @invariant()
    def memory_reads_back(self) -> None:
        size = self.memory.block_size
        for line in self.running:
            slots = line.table.slot_mapping(0, line.num_computed, size)
            assert self.memory.read(slots) == line.values(), f"{line.table.blocks} was overwritten"
        for line in self.swapped:
            seen = self.memory.read_host(line.table.host_blocks, line.num_computed)
            assert seen == line.values(), f"host blocks {line.table.host_blocks} were overwritten"

    @invariant()
    def manager_is_sound(self) -> None:
        if not self.with_plain_twin:
            return
        self.manager.check(line.table for line in self.lines)
        assert self.manager.pool.free_ids() == self.plain.pool.free, "eviction order"
        for line in self.lines:
            assert line.table.blocks == line.plain.blocks
            assert line.table.host_blocks == line.plain.host_blocks
            assert line.table.num_registered == line.plain.num_registered

    @invariant()
    def counts_are_those_of_the_plain_twin(self) -> None:
        if not self.with_plain_twin:
            return
        pool = self.manager.pool
        for block, count in self.plain.pool.refs.items():
            assert pool.ref_count(block) == count, f"reference count of block {block}"
            assert (block in pool.cache) == (block in self.plain.pool.name_of)
        assert len(pool.cache) == len(set(self.plain.pool.name_of.values()))


BlockManagerMachine.TestCase.settings = settings(
    max_examples=600,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestBlockManager = BlockManagerMachine.TestCase
