//! Conformance suite for engines. It checks the contract of the collectives and messages of a communicator.
//!
//! [`run`] takes only the communicator of all ranks, so it runs wherever an engine runs: over threads, under `mpirun`,
//! or on GPUs. Collective: call on all ranks with the same [`ConformanceOptions`]. Every rank generates the inputs of
//! all ranks from the seed, computes its expected result element by element, and compares.
//!
//! [`run_mismatch_case`] tests ranks with different calls. The communicator cannot be used afterwards, so [`run`] does
//! not include these cases.
//!
//! ```
//! # use burn_megatron_comm::World;
//! use burn_megatron_comm_testing::conformance::{self, ConformanceOptions};
//!
//! let options = ConformanceOptions { programs: 2, sizes: vec![0, 5], long: 100, fixed_order: true, ..ConformanceOptions::default() };
//! let reports = World::threads(2)?.run(|rank| conformance::run(&rank.communicator(), &options, &mut |_| {}))?;
//! assert_eq!(reports[0].checks(), reports[1].checks());
//! # Ok::<(), burn_megatron_comm::WorldError>(())
//! ```

mod groups;
mod messages;
mod mismatch;
mod misuse;
pub(crate) mod model;
mod operations;
mod order;
mod programs;
mod reductions;
mod suite;
pub(crate) mod values;

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn_megatron_comm::{CommError, Communicator, DType};
pub use mismatch::{MismatchCase, UnknownMismatchCase, run_mismatch_case};
use suite::CaseContext;

/// Options of the suite: the size of the tests, and guarantees of the engine beyond the [`Communicator`] trait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConformanceOptions {
    /// The number of random programs (default: 200).
    pub programs: usize,
    /// The number of calls of a random program (default: 30).
    pub steps: usize,
    /// The seed of all inputs and programs.
    pub seed: u64,
    /// The element types (default: all). Counts and rank numbers are always sent as `i64`.
    pub dtypes: Vec<DType>,
    /// The lengths with which every operation is tested, in elements (default: 0, 1, 7, 1000 and 20,011).
    pub sizes: Vec<usize>,
    /// The number of elements of the long buffers (default: 2^20, which is 4 MiB of `f32`).
    pub long: usize,
    /// Whether the engine reduces in a fixed order and accumulates 16-bit floats in `f32`, rounded once. The order is
    /// group order: neighbors first, then pairs of results, and so on. If true, sums of floats must be bitwise equal to
    /// the reference. Otherwise they may differ by the rounding error of any order.
    pub fixed_order: bool,
    /// Whether a maximum or minimum is NaN if any rank's value is NaN (default: true).
    pub nan_wins: bool,
    /// Whether a rank may send messages to itself (default: true).
    pub self_messages: bool,
}

impl Default for ConformanceOptions {
    fn default() -> Self {
        Self {
            programs: 200,
            steps: 30,
            seed: 1,
            dtypes: DType::ALL.to_vec(),
            sizes: vec![0, 1, 7, 1000, 20_011],
            long: 1 << 20,
            fixed_order: false,
            nan_wins: true,
            self_messages: true,
        }
    }
}

/// The result of the suite on one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConformanceReport {
    /// The cases, in the order of execution.
    pub cases: Vec<CaseReport>,
}

/// The result of one case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaseReport {
    /// The name, as in [`cases`].
    pub name: &'static str,
    /// The number of results that were compared, summed over all ranks. It is the same on every rank. It is zero if an
    /// option or the number of ranks leaves nothing to check.
    pub checks: u64,
    /// The time that the case took on this rank.
    pub time: Duration,
}

impl ConformanceReport {
    /// Returns the number of results that were compared in all cases, summed over all ranks.
    pub fn checks(&self) -> u64 {
        self.cases.iter().map(|case| case.checks).sum()
    }
}

/// An engine violates its contract. Ranks are world ranks.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConformanceError {
    /// A call returned a wrong result.
    #[error("{case}: rank {rank} in {call}: {difference}")]
    Wrong {
        /// The case: see [`cases`].
        case: &'static str,
        /// The rank that detected the violation.
        rank: usize,
        /// The call with its type, length and group.
        call: String,
        /// The difference: the first element that differs or the length, with the found and expected value.
        difference: String,
    },
    /// A call failed that must succeed, or it failed with the wrong error.
    #[error("{case}: rank {rank} in {call}: {source}")]
    Failed {
        /// The case: see [`cases`].
        case: &'static str,
        /// The rank that got the error.
        rank: usize,
        /// The call with its type, length and group.
        call: String,
        /// The error.
        source: Box<CommError>,
    },
    /// A list of [`ConformanceOptions`] is empty, so nothing would be checked.
    #[error("invalid conformance options: no {0}; expected at least one")]
    Nothing(&'static str),
    /// A case needs more ranks.
    #[error("{case}: the world has {ranks} ranks; expected at least {least}")]
    TooFewRanks {
        /// The case.
        case: &'static str,
        /// The minimum number of ranks.
        least: usize,
        /// The number of ranks.
        ranks: usize,
    },
}

type Check = fn(&mut CaseContext<'_>) -> Result<(), ConformanceError>;

/// The cases. Simple cases run first, so that the simplest case that detects a defect reports it.
const CASES: &[(&str, Check)] = &[
    ("all_reduce", operations::all_reduce),
    ("all_gather", operations::all_gather),
    ("reduce_scatter", operations::reduce_scatter),
    ("broadcast", operations::broadcast),
    ("all_to_all", operations::all_to_all),
    ("one-sided all_to_all", operations::one_sided),
    ("changing all_to_all", operations::changing),
    ("averages", reductions::averages),
    ("16-bit sums in f32", reductions::halves),
    ("order of sums", reductions::order),
    ("nan", reductions::nan),
    ("integers wrap", reductions::integers_wrap),
    ("long buffers", operations::long),
    ("messages", messages::ring),
    ("messages in order", messages::in_order),
    ("receives before sends", messages::receives_first),
    ("dropped messages", messages::dropped),
    ("handles in any order", order::any_order),
    ("dropped handles", order::dropped),
    ("calls started as one", order::started_as_one),
    ("splits", groups::splits),
    ("nested splits", groups::nested),
    ("the same name twice", groups::same_name),
    ("several groups at once", groups::at_once),
    ("messages of several groups", messages::of_groups),
    ("barrier", order::barrier),
    ("pool", order::pool),
    ("calls that do not fit", misuse::refused),
    ("random programs", programs::random),
];

/// Returns the names of the cases, in the order in which they run.
pub fn cases() -> impl Iterator<Item = &'static str> {
    CASES.iter().map(|(name, _)| *name)
}

/// Runs the whole suite on `world`, the communicator of all ranks. Calls `progress` with the name of each case before
/// it runs.
///
/// Collective: call on all ranks with the same options.
///
/// # Errors
/// [`ConformanceError`] on the rank that detects a violation. The other ranks get no report. Their next call fails,
/// because the engine reports a rank that has returned.
pub fn run(
    world: &Arc<dyn Communicator>,
    options: &ConformanceOptions,
    progress: &mut dyn FnMut(&str),
) -> Result<ConformanceReport, ConformanceError> {
    for (list, is_empty) in [
        ("types", options.dtypes.is_empty()),
        ("sizes", options.sizes.is_empty()),
    ] {
        if is_empty {
            return Err(ConformanceError::Nothing(list));
        }
    }
    let mut cases = Vec::with_capacity(CASES.len());
    for (name, check) in CASES {
        progress(name);
        let began = Instant::now();
        let mut suite = CaseContext::new(world, options, name);
        check(&mut suite)?;
        cases.push(CaseReport {
            name,
            checks: suite.total_checks()?,
            time: began.elapsed(),
        });
    }
    Ok(ConformanceReport { cases })
}
