//! The kind and the sizes of a schedule.

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::ScheduleError;

/// The kind of a schedule.
///
/// The text form, also in files, is `gpipe`, `1f1b`, `interleaved` (`interleaved:6` with groups of 6
/// micro-batches), `zb-h1`, `zb-v` or `dualpipe-v`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ScheduleKind {
    /// All forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965).
    GPipe,
    /// One forward, one backward: at most as many live micro-batches as there are later stages and one
    /// (Narayanan et al. 2021, arXiv:2104.04473).
    OneFOneB,
    /// 1F1B with several stages per rank, `ranks` apart (Narayanan et al. 2021).
    Interleaved {
        /// Consecutive micro-batches of one stage before the rank switches to its next stage; `None`
        /// for the number of ranks.
        group: Option<usize>,
    },
    /// 1F1B with split backwards, whose weight gradients fill the bubble; peak memory is that of 1F1B
    /// on the first rank (Qi et al. 2023, arXiv:2401.10241).
    ZbH1,
    /// Two stages per rank in a V, with no bubble within a rank if forward, input gradient and weight
    /// gradient take the same time (Qi et al. 2024, arXiv:2405.15362).
    ZbV,
    /// Two stages per rank in a V, forwards of one next to backwards of the other (the DualPipeV of DeepSeek-AI's DualPipe, 2025).
    DualPipeV,
}

impl ScheduleKind {
    /// Every kind, interleaved with the default group size.
    pub const ALL: [ScheduleKind; 6] = [
        ScheduleKind::GPipe,
        ScheduleKind::OneFOneB,
        ScheduleKind::Interleaved { group: None },
        ScheduleKind::ZbH1,
        ScheduleKind::ZbV,
        ScheduleKind::DualPipeV,
    ];

    /// The default number of stages per rank: 1, or 2 for kinds that need more.
    pub const fn default_virtual_stages(self) -> usize {
        match self {
            ScheduleKind::GPipe | ScheduleKind::OneFOneB | ScheduleKind::ZbH1 => 1,
            _ => 2,
        }
    }

    /// Whether rank r of p holds stages r and 2p-1-r.
    pub const fn is_v_shaped(self) -> bool {
        matches!(self, ScheduleKind::ZbV | ScheduleKind::DualPipeV)
    }

    /// Whether weight gradients are separate actions from input gradients.
    pub const fn splits_backward(self) -> bool {
        matches!(self, ScheduleKind::ZbH1) || self.is_v_shaped()
    }

    /// The name without the group.
    const fn name(self) -> &'static str {
        match self {
            ScheduleKind::GPipe => "gpipe",
            ScheduleKind::OneFOneB => "1f1b",
            ScheduleKind::Interleaved { .. } => "interleaved",
            ScheduleKind::ZbH1 => "zb-h1",
            ScheduleKind::ZbV => "zb-v",
            ScheduleKind::DualPipeV => "dualpipe-v",
        }
    }
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ScheduleKind::Interleaved { group: Some(group) } => {
                f.pad(&format!("{}:{group}", self.name()))
            }
            kind => f.pad(kind.name()),
        }
    }
}

impl FromStr for ScheduleKind {
    type Err = ScheduleError;

    fn from_str(name: &str) -> Result<Self, ScheduleError> {
        let group = name
            .strip_prefix("interleaved:")
            .and_then(|group| group.parse::<NonZeroUsize>().ok());
        if let Some(group) = group {
            let group = Some(group.get());
            return Ok(ScheduleKind::Interleaved { group });
        }
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| ScheduleError::UnknownKind { name: name.into() })
    }
}

impl TryFrom<String> for ScheduleKind {
    type Error = ScheduleError;

    fn try_from(name: String) -> Result<Self, ScheduleError> {
        name.parse()
    }
}

impl From<ScheduleKind> for String {
    fn from(kind: ScheduleKind) -> String {
        kind.to_string()
    }
}

/// The kind and sizes of a schedule; [`generate`](super::generate) checks them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduleConfig {
    /// The kind of schedule.
    pub kind: ScheduleKind,
    /// Ranks of the pipeline, p.
    pub ranks: usize,
    /// Stages per rank, v.
    pub virtual_stages: usize,
    /// Micro-batches of a step, m.
    pub micro_batches: usize,
}

impl ScheduleConfig {
    /// A schedule with the default number of stages per rank.
    pub const fn new(kind: ScheduleKind, ranks: usize, micro_batches: usize) -> Self {
        ScheduleConfig {
            kind,
            ranks,
            virtual_stages: kind.default_virtual_stages(),
            micro_batches,
        }
    }

    /// Sets the number of stages per rank.
    pub const fn with_virtual_stages(mut self, virtual_stages: usize) -> Self {
        self.virtual_stages = virtual_stages;
        self
    }
}
