//! A conformance suite for every engine: what the collectives and messages of a communicator promise.
//!
//! [`run`] takes only the communicator of all ranks, so it runs wherever an engine runs: over threads, under
//! `mpirun`, on GPUs. Collective: call on all ranks with the same [`ConformanceOptions`]. The inputs of all ranks
//! are generated from the seed on every rank, so each rank computes its expected result by itself, element by
//! element, and compares. [`run_mismatch_case`] is about ranks whose calls differ; the communicator cannot be used
//! afterwards, so it is not part of the run.
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

/// What is checked, and what the engine promises beyond the [`Communicator`] trait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConformanceOptions {
    /// Random programs; 200 by default.
    pub programs: usize,
    /// Calls of a random program; 30 by default.
    pub steps: usize,
    /// The seed of all numbers and programs.
    pub seed: u64,
    /// The types of the elements; all by default. Counts and rank numbers are sent as `i64`.
    pub dtypes: Vec<DType>,
    /// The lengths that every operation is checked with, in elements; 0, 1, 7, 1000 and 20,011 by
    /// default.
    pub sizes: Vec<usize>,
    /// The elements of the long buffers; 2^20 by default, which is 4 MiB of `f32`.
    pub long: usize,
    /// The engine reduces neighbours first, then the pairs of them, and so on up, in group order; 16-bit
    /// floats in `f32`, rounded once. Then the sums of floats are compared bit for bit, else within the
    /// rounding of any order.
    pub fixed_order: bool,
    /// A NaN of any rank wins a maximum and a minimum; true by default.
    pub nan_wins: bool,
    /// A rank may send messages to itself; true by default.
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

/// What was checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConformanceReport {
    /// In the order of execution.
    pub cases: Vec<CaseReport>,
}

/// One case of the suite.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaseReport {
    /// Its name, as in [`cases`].
    pub name: &'static str,
    /// The results that were compared, summed over all ranks: the same on every rank. None where an
    /// option or the number of ranks leaves nothing to check.
    pub checks: u64,
    /// How long this rank took.
    pub time: Duration,
}

impl ConformanceReport {
    /// The results that were compared in all cases, summed over all ranks.
    pub fn checks(&self) -> u64 {
        self.cases.iter().map(|case| case.checks).sum()
    }
}

/// An engine violates its contract. Ranks are world ranks.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConformanceError {
    /// A call gave a wrong result.
    #[error("{case}: rank {rank} in {call}: {difference}")]
    Wrong {
        /// The case, see [`cases`].
        case: &'static str,
        /// The rank that found it.
        rank: usize,
        /// The call, with its type, length and group.
        call: String,
        /// What was found and what was expected: the first element that differs, or the length.
        difference: String,
    },
    /// A call failed that must succeed, or failed with the wrong error.
    #[error("{case}: rank {rank} in {call}: {source}")]
    Failed {
        /// The case, see [`cases`].
        case: &'static str,
        /// The rank that got the error.
        rank: usize,
        /// The call, with its type, length and group.
        call: String,
        /// The error.
        source: Box<CommError>,
    },
    /// A list of [`ConformanceOptions`] is empty, so that nothing would be checked.
    #[error("invalid conformance options: no {0}; expected at least one")]
    Nothing(&'static str),
    /// A case needs more ranks.
    #[error("{case}: the world has {ranks} ranks; expected at least {least}")]
    TooFewRanks {
        /// The case.
        case: &'static str,
        /// The number of ranks that it needs.
        least: usize,
        /// The number of ranks.
        ranks: usize,
    },
}

type Check = fn(&mut CaseContext<'_>) -> Result<(), ConformanceError>;

/// The simple ones first, so that a defect is reported by the simplest case that shows it.
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

/// The names of the cases, in the order in which they run.
pub fn cases() -> impl Iterator<Item = &'static str> {
    CASES.iter().map(|(name, _)| *name)
}

/// Runs the whole suite on `world`, the communicator of all ranks. Collective: call on all ranks with the same
/// options. `progress` is called with the name of each case as it begins.
///
/// # Errors
/// [`ConformanceError`] on the rank that finds a violation. The others get no report: their next call fails as
/// the engine reports a rank that has returned.
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
