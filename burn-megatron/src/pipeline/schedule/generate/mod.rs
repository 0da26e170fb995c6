//! Generates schedules. A generator lists the computations of each rank in order.

mod groups;
mod interleaved;
mod rank_program;
mod single_stage;
mod v_shaped;

use super::{Action, Schedule, ScheduleConfig, ScheduleError, ScheduleKind};
use rank_program::RankProgram;

#[cfg(test)]
pub(super) use interleaved::table as interleaved_table;

/// The maximum number of computations of a schedule.
const MAX_COMPUTATIONS: usize = 1 << 24;

/// Generates a schedule, including sends, receives and reductions of gradients.
///
/// With p ranks, stage s is on rank s mod p. For a [V-shaped](ScheduleKind::is_v_shaped) kind, rank r holds the stages
/// r and 2p-1-r.
///
/// # Errors
///
/// [`ScheduleError::Zero`] if a size is 0; [`ScheduleError::VirtualStages`] or [`ScheduleError::Group`] if the kind
/// does not support the sizes; [`ScheduleError::Unpaired`] and [`ScheduleError::NoPair`] if pairs are requested, but
/// the schedule has no pairs; [`ScheduleError::TooLarge`] if it has too many computations.
pub fn generate(config: &ScheduleConfig) -> Result<Schedule, ScheduleError> {
    check(config)?;
    let (p, m) = (config.ranks, config.micro_batches);
    let list = |rank| match config.kind {
        ScheduleKind::GPipe => single_stage::gpipe(rank, m),
        ScheduleKind::OneFOneB | ScheduleKind::EagerOneFOneB => {
            let warm_up = warm_up(config, rank).unwrap_or(0);
            single_stage::one_f_one_b(rank, warm_up, m, config.pairs)
        }
        ScheduleKind::ZbH1 => single_stage::zb_h1(rank, p, m),
        ScheduleKind::Interleaved { group } => {
            let group = group.unwrap_or(p);
            interleaved::list(rank, config, group)
        }
        ScheduleKind::ZbV => v_shaped::zb_v(rank, p, m),
        ScheduleKind::DualPipeV => v_shaped::dualpipe_v(rank, p, m, config.pairs),
    };
    let placement = (0..p * config.virtual_stages).map(|stage| config.kind.rank_of(stage, p));
    let lists = (0..p).map(list).collect();
    let schedule = Schedule::new(config.kind.to_string(), placement.collect(), m, lists)?;
    if config.pairs && !schedule.has_pairs() {
        return Err(ScheduleError::NoPair {
            kind: config.kind,
            ranks: p,
            micro_batches: m,
            fits: fewest_with_pair(config),
        });
    }
    let schedule = schedule.with_communication()?;
    Ok(match config.kind {
        ScheduleKind::Interleaved { .. } => {
            schedule.with_reductions_after(interleaved::reductions_after)
        }
        _ => schedule.with_reduce_gradients(),
    })
}

/// Returns the number of warm-up forwards of a rank: the forwards before its steady state, in which one forward and one
/// backward alternate.
///
/// - 1F1B and ZB-H1: `min(p - r - 1, m)`
/// - eager 1F1B: `min(2(p - r - 1), m)`
/// - interleaved with groups of N: `2(p - r - 1) + (v - 1)N`, at most `vm`
/// - GPipe: all forwards are in the warm-up
///
/// If forwards and backwards are [paired](super::ActionKind::PairedForward), each result arrives one pair later than
/// without pairs, because it is sent at the end of the pair. Therefore 1F1B with pairs has one more warm-up forward
/// than eager 1F1B, and interleaved 1F1B with pairs has one more warm-up forward than without pairs. Returns `None` for
/// V-shaped kinds, whose warm-up has several phases, and for a rank that is out of range.
pub fn warm_up(config: &ScheduleConfig, rank: usize) -> Option<usize> {
    let below = config.ranks.checked_sub(rank + 1)?;
    match config.kind {
        ScheduleKind::GPipe => Some(config.micro_batches),
        ScheduleKind::OneFOneB if config.pairs => {
            let forwards = below.saturating_mul(2).saturating_add(1);
            Some(forwards.min(config.micro_batches))
        }
        ScheduleKind::OneFOneB | ScheduleKind::ZbH1 => Some(below.min(config.micro_batches)),
        ScheduleKind::EagerOneFOneB => Some(below.saturating_mul(2).min(config.micro_batches)),
        ScheduleKind::Interleaved { group } => {
            let group = group.unwrap_or(config.ranks);
            Some(interleaved::warm_up(below, config, group))
        }
        ScheduleKind::ZbV | ScheduleKind::DualPipeV => None,
    }
}

fn check(config: &ScheduleConfig) -> Result<(), ScheduleError> {
    let counts = [
        ("ranks", config.ranks),
        ("virtual stages", config.virtual_stages),
        ("micro-batches", config.micro_batches),
    ];
    if let Some((what, _)) = counts.into_iter().find(|(_, count)| *count == 0) {
        return Err(ScheduleError::Zero { what });
    }
    check_virtual_stages(config)?;
    if config.pairs && !config.kind.has_pairs() {
        return Err(ScheduleError::Unpaired { kind: config.kind });
    }
    let size = [config.virtual_stages, config.micro_batches, 3]
        .into_iter()
        .try_fold(config.ranks, usize::checked_mul);
    if size.is_none_or(|size| size > MAX_COMPUTATIONS) {
        return Err(ScheduleError::TooLarge {
            ranks: config.ranks,
            virtual_stages: config.virtual_stages,
            micro_batches: config.micro_batches,
            limit: MAX_COMPUTATIONS,
        });
    }
    match config.kind {
        ScheduleKind::Interleaved { group } => groups::check(
            config.ranks,
            config.micro_batches,
            group.unwrap_or(config.ranks),
        ),
        _ => Ok(()),
    }
}

/// Returns the minimum number of micro-batches with which some rank has a pair.
fn fewest_with_pair(config: &ScheduleConfig) -> usize {
    match config.kind {
        // The last rank pairs the forwards of its second stage, starting after the fold.
        ScheduleKind::DualPipeV => config.ranks + 1,
        _ => 2,
    }
}

fn check_virtual_stages(config: &ScheduleConfig) -> Result<(), ScheduleError> {
    let asked = config.virtual_stages;
    let fits = match config.kind {
        ScheduleKind::Interleaved { .. } if asked < 2 => "2 or more, or 1f1b",
        ScheduleKind::Interleaved { .. } => return Ok(()),
        kind if asked == kind.default_virtual_stages() => return Ok(()),
        ScheduleKind::ZbV | ScheduleKind::DualPipeV if asked == 1 => "2, or zb-h1",
        ScheduleKind::ZbV | ScheduleKind::DualPipeV => "2, or interleaved",
        ScheduleKind::ZbH1 if asked == 2 => "1, or zb-v",
        _ => "1, or interleaved",
    };
    Err(ScheduleError::VirtualStages {
        kind: config.kind,
        asked,
        fits,
    })
}
