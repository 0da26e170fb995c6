//! The time that a multiprocessor of compute capability 9.0 is busy with an instruction.
//!
//! Sources: the table of arithmetic throughput in the CUDA C++ programming guide, and the list of
//! pipelines in the documentation of Nsight Compute. An instruction in neither (conversions to FP8)
//! has the pipe of similar ones. An instruction without a known pipe only counts as issued: the
//! bound stays an upper one.

/// The execution pipes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pipe {
    /// The four schedulers, which issue one instruction of a plane per clock each.
    Issue,
    /// Adding and multiplying floats and pairs of halves, 128 lanes.
    Fma,
    /// Its half that multiplies integers, 64 lanes.
    FmaHeavy,
    /// Logic, comparing, adding integers, and packing conversions, 64 lanes.
    Alu,
    /// Transcendental functions and the other conversions, 16 lanes.
    Xu,
    /// Loads and stores: 32 lanes and 128 bytes.
    Lsu,
}

impl Pipe {
    /// All of them.
    pub const ALL: [Pipe; 6] = [
        Pipe::Issue,
        Pipe::Fma,
        Pipe::FmaHeavy,
        Pipe::Alu,
        Pipe::Xu,
        Pipe::Lsu,
    ];

    /// As a table shows it.
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

    /// Quarters of a clock that the pipe is busy with an instruction of one plane.
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

    /// The pipe of an instruction, by its name without modifiers.
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

/// Clocks of an access: 32 lanes take as many as their bytes fill of 128, and one at the least.
fn clocks<'a>(modifiers: impl Iterator<Item = &'a str>) -> u64 {
    let wide = modifiers.filter_map(|modifier| match modifier {
        "64" => Some(2),
        "128" | "M88" => Some(4),
        "256" => Some(8),
        _ => None,
    });
    wide.max().unwrap_or(1)
}
