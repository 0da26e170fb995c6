//! A kernel as steps.

use super::{Block, Fault, Kind, Lanes, Mask, Warp};
use crate::ptx::Guard;

/// The effect of an instruction on the lanes of a mask, which is never empty.
pub type Step = Box<dyn Fn(&mut Warp, Mask, &mut Block<'_>) -> Result<(), Fault> + Send + Sync>;

/// One instruction, lowered.
pub struct Op {
    /// The predicate that it depends on.
    pub guard: Option<Guard>,
    /// The action.
    pub action: Action,
    /// The kind by which it is counted.
    pub kind: Kind,
    /// The line of the PTX text.
    pub line: usize,
    /// Its name with modifiers.
    pub text: String,
}

/// The action of an instruction.
pub enum Action {
    /// Something with the lanes that run it, after which they go on behind it.
    Step(Step),
    /// `bra`
    Jump(usize),
    /// `brx.idx`: the lane's index chooses.
    Table {
        /// Which of the targets.
        index: Source,
        /// Instructions.
        targets: Vec<usize>,
    },
    /// `ret`, `exit`
    Exit,
    /// `bar.sync` and its like.
    Barrier {
        /// Which of 16.
        number: Source,
        /// The number of threads; all of the block if there is no number.
        threads: Option<Source>,
        /// The wait at the barrier.
        wait: Wait,
    },
    /// `bar.warp.sync`: waits until all lanes that each names do so too, at whatever instruction.
    Gather {
        /// The lanes, as a mask.
        members: Source,
    },
    /// `shfl.sync` and its like: the step is taken when all lanes that each names are here.
    Meet {
        /// The lanes, as a mask.
        members: Source,
        /// The step that they perform together.
        step: Step,
    },
    /// Waits for something that other warps do: the step, then it is another warp's turn.
    Yield(Step),
}

/// The behaviour of a thread at a barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// `bar.arrive`: goes on.
    Arrive,
    /// `bar.sync`: waits for the others.
    Sync,
    /// `bar.red`: waits, and learns of a predicate of all. The predicate, and whether it is negated.
    Reduce(Reduce, usize, bool),
}

/// The result of `bar.red`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// The number of threads whose predicate is true, in a data register.
    Count(usize),
    /// Whether all have it, in a predicate.
    All(usize),
    /// Whether any has it.
    Any(usize),
}

/// Where a value is read from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Source {
    /// A register.
    Register(usize),
    /// A predicate, as 0 or 1.
    Predicate(usize),
    /// The same bits in every lane.
    Value(u64),
    /// A register that cannot be written.
    Special(Special),
}

/// `%tid.x` and its like.
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
    /// `%clock` and `%clock64`: the instructions of the warp.
    Clock,
}

/// A parameter of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Where it begins.
    pub offset: usize,
    /// Its bytes.
    pub size: usize,
}

/// A kernel that can be run.
pub struct Program {
    /// Its name.
    pub name: String,
    /// Its instructions.
    pub ops: Vec<Op>,
    /// For each instruction the one where lanes that part there meet again.
    pub reconvergences: Vec<usize>,
    /// The numbers of data registers and predicates of a lane.
    pub registers: (usize, usize),
    /// Bytes of shared memory that it declares itself.
    pub shared: usize,
    /// Bytes of local memory of a lane.
    pub local: usize,
    /// Its parameters.
    pub parameters: Vec<Parameter>,
    /// Whether it uses `mbarrier`, by which threads wait for each other in ways that only it knows.
    pub asynchronous: bool,
}

impl Op {
    /// Whether every lane ends here.
    pub(super) fn ends(&self) -> bool {
        self.guard.is_none() && matches!(self.action, Action::Exit)
    }
}

impl Source {
    /// The values of all lanes. Those outside of a mask mean nothing.
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
