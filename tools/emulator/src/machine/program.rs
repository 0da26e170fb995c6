//! A kernel as executable steps.

use super::{Block, Fault, Kind, Lanes, Mask, Warp};
use crate::ptx::Guard;

/// The effect of an instruction on the lanes of a mask. The mask is never empty.
pub type Step = Box<dyn Fn(&mut Warp, Mask, &mut Block<'_>) -> Result<(), Fault> + Send + Sync>;

/// A lowered instruction.
pub struct Op {
    /// The predicate of the instruction.
    pub guard: Option<Guard>,
    /// The action.
    pub action: Action,
    /// The kind for the counts.
    pub kind: Kind,
    /// The line of the PTX text.
    pub line: usize,
    /// The name of the instruction with its modifiers.
    pub text: String,
}

/// Action of an instruction.
pub enum Action {
    /// A step of the active lanes, which then continue with the next instruction.
    Step(Step),
    /// A branch, `bra`.
    Jump(usize),
    /// An indexed branch, `brx.idx`. The index of each lane selects the target.
    Table {
        /// The index into the targets.
        index: Source,
        /// The target instructions.
        targets: Vec<usize>,
    },
    /// The end of the kernel, `ret` or `exit`.
    Exit,
    /// A barrier, such as `bar.sync`.
    Barrier {
        /// The number of the barrier, below 16.
        number: Source,
        /// The number of threads. The default is all threads of the block.
        threads: Option<Source>,
        /// The behaviour at the barrier.
        wait: Wait,
    },
    /// `bar.warp.sync`: waits until all named lanes also wait, at any instruction.
    Gather {
        /// The lanes, as a mask.
        members: Source,
    },
    /// `shfl.sync` and similar instructions: the step runs when all named lanes are at this instruction.
    Meet {
        /// The lanes, as a mask.
        members: Source,
        /// The step that the lanes execute together.
        step: Step,
    },
    /// A step that waits for other warps. Another warp runs after the step.
    Yield(Step),
}

/// Behaviour of a thread at a barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// `bar.arrive`: continues.
    Arrive,
    /// `bar.sync`: waits for the other threads.
    Sync,
    /// `bar.red`: waits, and reduces a predicate of all threads. The fields are the result, the predicate, and
    /// whether the predicate is negated.
    Reduce(Reduce, usize, bool),
}

/// Result of `bar.red`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// The number of threads whose predicate is true, in a data register.
    Count(usize),
    /// Whether all predicates are true, in a predicate.
    All(usize),
    /// Whether any predicate is true, in a predicate.
    Any(usize),
}

/// Source of a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Source {
    /// A register.
    Register(usize),
    /// A predicate, as 0 or 1.
    Predicate(usize),
    /// The same bits in every lane.
    Value(u64),
    /// A special register, which is read-only.
    Special(Special),
}

/// Special registers, such as `%tid.x`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    /// `%tid`, by dimension.
    Thread(usize),
    /// `%ntid`
    Threads(usize),
    /// `%ctaid`
    Block(usize),
    /// `%nctaid`
    Blocks(usize),
    /// `%laneid`
    Lane,
    /// `%warpid`
    Warp,
    /// `%lanemask_eq`, `_le`, `_lt`, `_ge`, `_gt`, in this order.
    Lanes(usize),
    /// `%dynamic_smem_size`
    DynamicShared,
    /// `%clock` and `%clock64`: the number of instructions of the warp.
    Clock,
}

/// A parameter of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// The offset.
    pub offset: usize,
    /// The size in bytes.
    pub size: usize,
}

/// An executable kernel.
pub struct Program {
    /// The name.
    pub name: String,
    /// The instructions.
    pub ops: Vec<Op>,
    /// For each instruction, the instruction at which diverged lanes reconverge.
    pub reconvergences: Vec<usize>,
    /// The numbers of data registers and predicates per lane.
    pub registers: (usize, usize),
    /// Bytes of static shared memory.
    pub shared: usize,
    /// Bytes of local memory per lane.
    pub local: usize,
    /// The parameters.
    pub parameters: Vec<Parameter>,
    /// Whether the program uses `mbarrier`, with which threads synchronize in ways that the emulator does not track.
    pub asynchronous: bool,
}

impl Op {
    /// Returns whether every lane exits at this instruction.
    pub(super) fn ends(&self) -> bool {
        self.guard.is_none() && matches!(self.action, Action::Exit)
    }
}

impl Source {
    /// Returns the values of all lanes. Values of lanes outside of the mask are undefined.
    #[inline]
    pub fn read(self, warp: &Warp, block: &Block<'_>) -> Lanes {
        match self {
            Self::Register(index) => warp.registers[index],
            Self::Value(bits) => [bits; super::LANES],
            Self::Predicate(index) => {
                let bits = warp.predicates[index];
                std::array::from_fn(|lane| u64::from(bits >> lane & 1))
            }
            Self::Special(special) => special.read(warp, block),
        }
    }
}

impl Special {
    fn read(self, warp: &Warp, block: &Block<'_>) -> Lanes {
        let launch = block.launch;
        let uniform = |value: u32| [u64::from(value); super::LANES];
        match self {
            Self::Thread(axis) => warp.threads[axis],
            Self::Threads(axis) => uniform(launch.block[axis]),
            Self::Block(axis) => uniform(block.position[axis]),
            Self::Blocks(axis) => uniform(launch.grid[axis]),
            Self::Lane => std::array::from_fn(|lane| lane as u64),
            Self::Warp => uniform(warp.number as u32),
            Self::Lanes(which) => std::array::from_fn(|lane| {
                let one = 1u32 << lane;
                let below = one - 1;
                let set = [one, below | one, below, !below, !(below | one)][which];
                u64::from(set)
            }),
            Self::DynamicShared => uniform(launch.dynamic_shared as u32),
            Self::Clock => [warp.clock; super::LANES],
        }
    }
}
