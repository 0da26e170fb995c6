//! The kinds of pipeline schedules, and the source of the schedule of a run.

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

use super::as_text::serde_as_text;

/// A kind of pipeline schedule.
///
/// In files and on the command line, a kind is written as `gpipe`, `1f1b`, `eager-1f1b`, `interleaved` (or
/// `interleaved:6` with groups of 6 micro-batches), `zb-h1`, `zb-v` or `dualpipe-v`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScheduleKind {
    /// All forward passes, then all backward passes (Huang et al. 2019, arXiv:1811.06965).
    GPipe,
    /// One forward, one backward (1F1B). The number of micro-batches whose activations a stage keeps is at most one
    /// more than the number of later stages (Narayanan et al. 2021, arXiv:2104.04473).
    OneFOneB,
    /// 1F1B with twice the number of forward passes before the first backward pass, so that transfers overlap with
    /// computation (Zhuang et al. 2022, arXiv:2211.05322).
    EagerOneFOneB,
    /// 1F1B with several stages per rank. In a pipeline of `p` ranks, rank `r` holds the stages `r`, `r + p`, `r + 2p`,
    /// and so on (Narayanan et al. 2021).
    Interleaved {
        /// The number of consecutive micro-batches that a rank processes for one stage before it switches to its next
        /// stage. `None` means the number of pipeline ranks.
        group: Option<usize>,
    },
    /// 1F1B with split backward passes: weight gradients are computed while the rank would otherwise be idle. The peak
    /// memory equals the peak memory of 1F1B on the first rank (Qi et al. 2023, arXiv:2401.10241).
    ZbH1,
    /// Two stages per rank, assigned in a V shape. A rank is never idle if the forward pass, the input gradient and the
    /// weight gradient take the same time (Qi et al. 2024, arXiv:2405.15362).
    ZbV,
    /// Two stages per rank, assigned in a V shape. The forward passes of one stage overlap with the backward passes of
    /// the other stage (DualPipeV of DeepSeek-AI's DualPipe, 2025).
    DualPipeV,
}

impl ScheduleKind {
    /// The list of all kinds. The interleaved schedule in the list has the default group size.
    pub const ALL: [ScheduleKind; 7] = [
        ScheduleKind::GPipe,
        ScheduleKind::OneFOneB,
        ScheduleKind::EagerOneFOneB,
        ScheduleKind::Interleaved { group: None },
        ScheduleKind::ZbH1,
        ScheduleKind::ZbV,
        ScheduleKind::DualPipeV,
    ];

    /// Returns the default number of stages per rank: 1, or 2 for schedules that need several stages per rank.
    pub const fn default_virtual_stages(self) -> usize {
        match self {
            ScheduleKind::GPipe
            | ScheduleKind::OneFOneB
            | ScheduleKind::EagerOneFOneB
            | ScheduleKind::ZbH1 => 1,
            _ => 2,
        }
    }

    /// Returns whether the stages are assigned in a V shape: rank `r` of `p` ranks holds the stages `r` and
    /// `2p - 1 - r`.
    pub const fn is_v_shaped(self) -> bool {
        matches!(self, ScheduleKind::ZbV | ScheduleKind::DualPipeV)
    }

    /// Returns the rank that holds the stage `stage` in a pipeline of `ranks` ranks.
    pub const fn rank_of(self, stage: usize, ranks: usize) -> usize {
        let offset = stage % ranks;
        let returns = stage / ranks % 2 == 1;
        if self.is_v_shaped() && returns {
            ranks - 1 - offset
        } else {
            offset
        }
    }

    /// Returns whether the schedule computes weight gradients separately from input gradients.
    pub const fn splits_backward(self) -> bool {
        matches!(self, ScheduleKind::ZbH1) || self.is_v_shaped()
    }

    /// Returns whether the schedule can pair the forward pass of one micro-batch with the complete backward pass of
    /// another micro-batch.
    pub const fn has_pairs(self) -> bool {
        matches!(
            self,
            ScheduleKind::OneFOneB | ScheduleKind::Interleaved { .. } | ScheduleKind::DualPipeV
        )
    }

    /// Returns the name without the group size.
    const fn name(self) -> &'static str {
        match self {
            ScheduleKind::GPipe => "gpipe",
            ScheduleKind::OneFOneB => "1f1b",
            ScheduleKind::EagerOneFOneB => "eager-1f1b",
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
    type Err = UnknownScheduleKind;

    fn from_str(name: &str) -> Result<Self, UnknownScheduleKind> {
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
            .ok_or_else(|| UnknownScheduleKind(name.into()))
    }
}

serde_as_text!(ScheduleKind);

/// The error for a string that is not a [`ScheduleKind`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid schedule \"{0}\": expected gpipe, 1f1b, eager-1f1b, interleaved (or interleaved:N with groups \
     of N micro-batches), zb-h1, zb-v or dualpipe-v"
)]
pub struct UnknownScheduleKind(pub String);

/// The source of a pipeline schedule: a built-in kind of schedule, or a CSV file.
///
/// As text, for example in a recipe file, a source is the name of the kind or a path that ends with `.csv`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ScheduleSource {
    /// A schedule that is generated for the number of stages and micro-batches.
    Kind(ScheduleKind),
    /// A schedule that is read from the CSV file with this path.
    File(String),
}

impl Default for ScheduleSource {
    fn default() -> Self {
        ScheduleKind::OneFOneB.into()
    }
}

impl From<ScheduleKind> for ScheduleSource {
    fn from(kind: ScheduleKind) -> Self {
        Self::Kind(kind)
    }
}

impl fmt::Display for ScheduleSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kind(kind) => kind.fmt(f),
            Self::File(path) => f.pad(path),
        }
    }
}

impl FromStr for ScheduleSource {
    type Err = UnknownScheduleKind;

    fn from_str(text: &str) -> Result<Self, UnknownScheduleKind> {
        if text.ends_with(".csv") {
            return Ok(Self::File(text.into()));
        }
        Ok(Self::Kind(text.parse()?))
    }
}

serde_as_text!(ScheduleSource);
