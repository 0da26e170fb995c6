//! The time that an instruction occupies a multiprocessor of compute capability 9.0.
//!
//! Sources: the table of arithmetic throughput in the CUDA C++ programming guide, and the list of pipelines in the
//! documentation of Nsight Compute. Conversions to FP8 are in neither source and are assigned to the pipe of similar
//! instructions. An instruction without a known pipe counts only as issued, so the bound remains an upper bound.

/// The execution pipes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pipe {
    /// The four schedulers. Each scheduler issues one instruction of a plane per clock.
    Issue,
    /// Addition and multiplication of floats and of pairs of halves, 128 lanes.
    Fma,
    /// The half of the FMA pipe that also multiplies integers, 64 lanes.
    FmaHeavy,
    /// Logic, comparison, integer addition, and packing conversions, 64 lanes.
    Alu,
    /// Transcendental functions and all other conversions, 16 lanes.
    Xu,
    /// Loads and stores: 32 lanes and 128 bytes per clock.
    Lsu,
}

impl Pipe {
    /// All pipes.
    pub const ALL: [Pipe; 6] = [
        Pipe::Issue,
        Pipe::Fma,
        Pipe::FmaHeavy,
        Pipe::Alu,
        Pipe::Xu,
        Pipe::Lsu,
    ];

    /// Returns the name for tables.
    pub fn name(self) -> &'static str {
        match self {
            Pipe::Issue => "issue",
            Pipe::Fma => "fma",
            Pipe::FmaHeavy => "imad",
            Pipe::Alu => "alu",
            Pipe::Xu => "xu",
            Pipe::Lsu => "lsu",
        }
    }

    /// Returns the time that one instruction of a plane occupies the pipe, in quarters of a clock.
    pub fn quarters(self, instruction: &str) -> u64 {
        let mut modifiers = instruction.split('.');
        let kind = modifiers.next().unwrap_or_default();
        let of = Pipe::of(kind);
        match self {
            Pipe::Issue => 1,
            Pipe::Fma => match of {
                Some(Pipe::Fma) => 1,
                Some(Pipe::FmaHeavy) => 2,
                _ => 0,
            },
            _ if of != Some(self) => 0,
            Pipe::FmaHeavy | Pipe::Alu => 2,
            Pipe::Xu => 8,
            Pipe::Lsu => 4 * clocks(modifiers),
        }
    }

    /// Returns the pipe of an instruction. `kind` is the name without modifiers.
    fn of(kind: &str) -> Option<Pipe> {
        Some(match kind {
            "FADD" | "FMUL" | "FFMA" | "HADD2" | "HMUL2" | "HFMA2" => Pipe::Fma,
            "IMAD" | "IMUL" | "IDP" => Pipe::FmaHeavy,
            "MUFU" | "F2F" | "F2I" | "I2F" | "FRND" | "POPC" | "FLO" | "BREV" => Pipe::Xu,
            "LDG" | "STG" | "LD" | "ST" | "LDS" | "STS" | "LDL" | "STL" | "LDSM" | "STSM"
            | "LDGSTS" | "SHFL" | "ATOM" | "ATOMG" | "ATOMS" | "RED" => Pipe::Lsu,
            "IADD3" | "VIADD" | "LOP3" | "SHF" | "SHL" | "SHR" | "LEA" | "PRMT" | "SEL"
            | "FSEL" | "MOV" | "ISETP" | "FSETP" | "HSETP2" | "PLOP3" | "FMNMX" | "FMNMX3"
            | "HMNMX2" | "VHMNMX" | "IMNMX" | "VIMNMX" | "VIMNMX3" | "VIADDMNMX" | "F2FP"
            | "I2FP" | "IABS" | "SGXT" | "BMSK" | "P2R" | "R2P" | "VOTE" => Pipe::Alu,
            _ => return None,
        })
    }
}

/// Returns the clocks of an access. The bytes of 32 lanes pass at 128 bytes per clock, in at least one clock.
fn clocks<'a>(modifiers: impl Iterator<Item = &'a str>) -> u64 {
    let wide = modifiers.filter_map(|modifier| match modifier {
        "64" => Some(2),
        "128" | "M88" => Some(4),
        "256" => Some(8),
        _ => None,
    });
    wide.max().unwrap_or(1)
}
