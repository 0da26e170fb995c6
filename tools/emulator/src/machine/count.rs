//! Counts the work of a launch. The counts do not depend on the host.

/// Kind of an instruction in the counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Integers, bits, comparisons, selections.
    Integer,
    /// Floating-point instructions of any width.
    Float,
    /// `ex2`, `lg2`, `rcp`, `rsqrt`, `sqrt`, `sin`, `cos`, `tanh`, and divisions.
    Special,
    /// Conversions.
    Convert,
    /// Moves. A compiler removes most of them.
    Move,
    /// Loads from and stores to global memory.
    Global,
    /// Loads from and stores to shared memory.
    Shared,
    /// Loads from and stores to local memory and parameters.
    Private,
    /// Atomics.
    Atomic,
    /// Exchange between lanes.
    Lanes,
    /// Matrix products of tensor cores, and the loads of their operands.
    Matrix,
    /// Branches, barriers, fences.
    Control,
}

impl Kind {
    /// All kinds, in order.
    pub const ALL: [Self; 12] = [
        Self::Integer,
        Self::Float,
        Self::Special,
        Self::Convert,
        Self::Move,
        Self::Global,
        Self::Shared,
        Self::Private,
        Self::Atomic,
        Self::Lanes,
        Self::Matrix,
        Self::Control,
    ];
}

/// The counts of a launch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Instructions of warps, indexed by their [`Kind`].
    pub instructions: [u64; Kind::ALL.len()],
    /// Bytes that lanes read from global memory, and bytes that they write.
    pub global_bytes: (u64, u64),
    /// Sectors of 32 bytes that instructions read, and sectors that they write. Each instruction is counted
    /// separately.
    pub global_sectors: (u64, u64),
    /// Passes over the 32 banks of shared memory in addition to the first pass of each instruction.
    pub bank_conflicts: u64,
    /// Wavefronts: the minimum number of passes over the 32 banks of shared memory for all accesses.
    pub shared_wavefronts: u64,
    /// Additions and multiplications of tensor cores.
    pub matrix_flops: u64,
    /// Instructions of the warp that executes the most instructions.
    pub longest_warp: u64,
    /// Operations of `atom` and `red`. Each lane and each element of a vector counts.
    pub atomics: u64,
    /// The numbers of different sectors that the whole launch reads and writes. Memory must move at least these
    /// sectors. Counted only if [requested](super::Options::touched).
    pub touched_sectors: (u64, u64),
}

impl Counts {
    /// Counts an instruction of a warp.
    #[inline]
    pub fn instruction(&mut self, kind: Kind) {
        self.instructions[kind as usize] += 1;
    }

    /// Adds other counts. The longest warp is the maximum. Sectors that both launches access count twice.
    pub fn add(&mut self, other: &Self) {
        for (sum, count) in self.instructions.iter_mut().zip(other.instructions) {
            *sum += count;
        }
        self.global_bytes.0 += other.global_bytes.0;
        self.global_bytes.1 += other.global_bytes.1;
        self.global_sectors.0 += other.global_sectors.0;
        self.global_sectors.1 += other.global_sectors.1;
        self.bank_conflicts += other.bank_conflicts;
        self.shared_wavefronts += other.shared_wavefronts;
        self.matrix_flops += other.matrix_flops;
        self.longest_warp = self.longest_warp.max(other.longest_warp);
        self.atomics += other.atomics;
        self.touched_sectors.0 += other.touched_sectors.0;
        self.touched_sectors.1 += other.touched_sectors.1;
    }
}
