//! A conformance suite for communication engines. It checks the guarantees of the [`Communicator`] trait.
//!
//! [`run`] needs only the communicator of all ranks, so it can test any engine: over threads, under `mpirun`, or on
//! GPUs. Collective: call [`run`] on all ranks with the same [`ConformanceOptions`]. Every rank generates the inputs of
//! all ranks from the seed, computes its expected result element by element, and compares it with the actual result.
//!
//! [`run_mismatch_case`] tests what happens if ranks issue different calls. The communicator cannot be used afterwards,
//! so [`run`] does not include these cases.
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

/// The options of the conformance suite: the size of the tests, and optional guarantees of the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConformanceOptions {
    /// The number of random programs. Each program is a random sequence of calls. The default is 200.
    pub programs: usize,
    /// The number of calls in a random program. The default is 30.
    pub steps: usize,
    /// The seed from which all inputs and programs are generated.
    pub seed: u64,
    /// The element types to test. The default is all types. Counts and rank numbers are always sent as `i64`.
    pub dtypes: Vec<DType>,
    /// The buffer lengths with which every operation is tested, in elements. The default is 0, 1, 7, 1000 and 20,011.
    pub sizes: Vec<usize>,
    /// The length of the buffers in the tests of long buffers, in elements. The default is 2^20, which is 4 MiB of
    /// `f32`.
    pub long: usize,
    /// Whether the engine reduces in group order and accumulates 16-bit floats in `f32` with one rounding at the end.
    /// Group order means that adjacent ranks are combined first, then pairs of results, and so on. If true,
    /// floating-point sums must be bit-identical to the reference. If false, they may differ by the rounding error of
    /// any order.
    pub fixed_order: bool,
    /// Whether a maximum or minimum is NaN if the value of any rank is NaN. The default is true.
    pub nan_wins: bool,
    /// Whether a rank may send messages to itself. The default is true.
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

/// The result of the conformance suite on one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConformanceReport {
    /// The results of the test cases, in the order of execution.
    pub cases: Vec<CaseReport>,
}

/// The result of one test case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaseReport {
    /// The name of the test case. [`cases`] lists all names.
    pub name: &'static str,
    /// The number of compared results, summed over all ranks. It is the same on every rank. It is zero if the test case
    /// has nothing to check with the given options and the number of ranks.
    pub checks: u64,
    /// The time that the test case took on this rank.
    pub time: Duration,
}

impl ConformanceReport {
    /// Returns the total number of compared results in all test cases, summed over all ranks.
    pub fn checks(&self) -> u64 {
        self.cases.iter().map(|case| case.checks).sum()
    }
}

/// The error for an engine that violates the guarantees of a communicator. Ranks are world ranks.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConformanceError {
    /// A call returned a wrong result.
    #[error("{case}: rank {rank} in {call}: {difference}")]
    Wrong {
        /// The name of the test case. [`cases`] lists all names.
        case: &'static str,
        /// The rank that detected the violation.
        rank: usize,
        /// The call, with its type, length and group.
        call: String,
        /// The difference: either the lengths or the first element that differs, with the actual and the expected
        /// value.
        difference: String,
    },
    /// A call failed that should succeed, or a call failed with the wrong error.
    #[error("{case}: rank {rank} in {call}: {source}")]
    Failed {
        /// The name of the test case. [`cases`] lists all names.
        case: &'static str,
        /// The rank that got the error.
        rank: usize,
        /// The call, with its type, length and group.
        call: String,
        /// The error.
        source: Box<CommError>,
    },
    /// A list in the [`ConformanceOptions`] is empty, so nothing would be tested.
    #[error("invalid conformance options: expected at least one of {0}, got none")]
    Nothing(&'static str),
    /// A test case requires more ranks than the world has.
    #[error("{case}: the world has {ranks} ranks: expected at least {least}")]
    TooFewRanks {
        /// The name of the test case.
        case: &'static str,
        /// The required number of ranks.
        least: usize,
        /// The number of ranks in the world.
        ranks: usize,
    },
}

type Check = fn(&mut CaseContext<'_>) -> Result<(), ConformanceError>;

/// The test cases. Simple cases run first, so that a defect is reported by the simplest case that detects it.
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

/// Returns the names of all test cases, in the order in which they run.
pub fn cases() -> impl Iterator<Item = &'static str> {
    CASES.iter().map(|(name, _)| *name)
}

/// Runs the conformance suite. `world` is the communicator of all ranks. Calls `progress` with the name of each test
/// case before the case runs.
///
/// Collective: call on all ranks with the same options.
///
/// # Errors
/// [`ConformanceError`] on the rank that detects a violation. The other ranks get no report: their next call fails,
/// because the engine detects that a rank has returned.
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
