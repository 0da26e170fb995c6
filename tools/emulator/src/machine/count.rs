//! The work of a launch, in numbers that do not depend on the machine it runs on.

/// The kind by which an instruction is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Whole numbers, bits, comparisons, selections.
    Integer,
    /// Floating point, of whatever width.
    Float,
    /// `ex2`, `lg2`, `rcp`, `rsqrt`, `sqrt`, `sin`, `cos`, `tanh`, and divisions.
    Special,
    /// Conversions.
    Convert,
    /// Moves, which a compiler mostly removes.
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
    /// Products by matrix units, and what feeds them.
    Matrix,
    /// Branches, barriers, fences.
    Control,
}

impl Kind {
    /// All of them, in order.
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

/// The numbers of a launch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Instructions of warps, by the number of their [`Kind`].
    pub instructions: [u64; Kind::ALL.len()],
    /// Bytes that lanes read from global memory, and that they write.
    pub global_bytes: (u64, u64),
    /// Sectors of 32 bytes that these instructions touch, each instruction by itself.
    pub global_sectors: (u64, u64),
    /// Passes over the 32 banks of shared memory beyond the first of each instruction.
    pub bank_conflicts: u64,
    /// Wavefronts: passes over the 32 banks of shared memory that all accesses together take at the
    /// least.
    pub shared_wavefronts: u64,
    /// Additions and multiplications by matrix units.
    pub matrix_flops: u64,
    /// Instructions of the warp that runs the most.
    pub longest_warp: u64,
    /// Operations of `atom` and `red`, each lane and each element of a vector by itself.
    pub atomics: u64,
    /// Different sectors that the whole launch reads, and those that it writes: what memory must move
    /// at the least. Only where [asked for](super::Options::touched).
    pub touched_sectors: (u64, u64),
}

impl Counts {
    /// One instruction of a warp.
    #[inline]
    pub fn instruction(&mut self, kind: Kind) {
        self.instructions[kind as usize] += 1;
    }

    /// The sum of both, and the longer of both longest warps; sectors that both touch count twice.
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
