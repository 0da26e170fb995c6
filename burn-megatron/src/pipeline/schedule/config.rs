//! The kind and the sizes of a schedule.

use serde::{Deserialize, Serialize};

pub use crate::mesh::ScheduleKind;

/// The configuration of a schedule that [`generate`](super::generate) creates: its kind and its sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduleConfig {
    /// The kind of schedule.
    pub kind: ScheduleKind,
    /// The number of pipeline ranks (p in formulas).
    pub ranks: usize,
    /// The number of stages per rank (virtual stages, v in formulas).
    pub virtual_stages: usize,
    /// The number of micro-batches per step (m in formulas).
    pub micro_batches: usize,
    /// Whether forwards are [paired](super::ActionKind::PairedForward) with backwards of other micro-batches. Requires
    /// a 1F1B, interleaved 1F1B or DualPipeV schedule.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pairs: bool,
}

impl ScheduleConfig {
    /// Creates a configuration with the default number of stages per rank.
    pub const fn new(kind: ScheduleKind, ranks: usize, micro_batches: usize) -> Self {
        ScheduleConfig {
            kind,
            ranks,
            virtual_stages: kind.default_virtual_stages(),
            micro_batches,
            pairs: false,
        }
    }

    /// Sets whether forwards are paired with backwards of other micro-batches.
    pub const fn with_pairs(mut self, pairs: bool) -> Self {
        self.pairs = pairs;
        self
    }

    /// Sets the number of stages per rank.
    pub const fn with_virtual_stages(mut self, virtual_stages: usize) -> Self {
        self.virtual_stages = virtual_stages;
        self
    }
}
