//! The parallel layouts that [`verify`](crate::verify) compares with one rank.

mod text;

use burn_megatron::data_parallel::{DataParallelConfig, ZeroStage};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::pipeline::schedule::Schedule;
use burn_megatron::pipeline::{LayoutScheduleError, schedule_of};

pub use text::{LayoutPartError, ParseLayoutError};

/// A parallel layout with a micro-batch size. It can be parsed from text, such as `tp2-sp-dp2`. The data-parallel size
/// is always set.
///
/// ```
/// use burn_megatron_verify::Layout;
///
/// let layout: Layout = "tp2-sp-dp2".parse()?;
/// assert_eq!((layout.ranks(), layout.parallel.tensor), (4, 2));
/// assert!(layout.parallel.sequence_parallel);
/// assert_eq!(layout.to_string(), "tp2-sp-dp2");
/// assert!("tp2-tp4".parse::<Layout>().is_err());
/// # Ok::<(), burn_megatron_verify::ParseLayoutError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The parallel layout.
    pub parallel: ParallelConfig,
    /// The number of samples per micro-batch. `None` means that all samples of a rank form one micro-batch.
    pub micro_batch: Option<usize>,
}

impl Default for Layout {
    /// Returns the layout of one rank.
    fn default() -> Self {
        Self {
            parallel: ParallelConfig::new().with_data(1),
            micro_batch: None,
        }
    }
}

/// The gradient bucket size of `verify`, in elements. It is small, so that even small models have several buckets, and
/// parameters that are split over several shards.
const BUCKET: usize = 5000;

impl Layout {
    /// Returns the data-parallel settings of the layout.
    pub fn data_parallel(&self) -> DataParallelConfig {
        let ParallelConfig {
            zero_stage, hsdp, ..
        } = self.parallel;
        DataParallelConfig {
            zero_stage,
            hsdp,
            bucket_size: (zero_stage < ZeroStage::Parameters).then_some(BUCKET),
            ..DataParallelConfig::default()
        }
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.parallel.world_size().unwrap_or(usize::MAX)
    }

    /// Returns the pipeline schedule for `samples` samples per data-parallel rank.
    ///
    /// # Errors
    ///
    /// [`LayoutScheduleError`] if the schedule does not support these sizes.
    pub fn schedule(&self, samples: usize) -> Result<Schedule, LayoutScheduleError> {
        let micro_batches = samples / self.micro_batch.unwrap_or(samples).max(1);
        schedule_of(&self.parallel, micro_batches)
    }

    /// Returns all combinations of the tensor-parallel sizes 1, 2 and 4, sequence parallelism off and on, and the
    /// data-parallel sizes 1 and 2. Each layout has two micro-batches.
    pub fn standard() -> Vec<Self> {
        let mut layouts = vec![];
        for tensor in [1, 2, 4] {
            for sequence_parallel in [false, true] {
                for data in [1, 2] {
                    let layout = Self {
                        parallel: ParallelConfig::new()
                            .with_tensor(tensor)
                            .with_data(data)
                            .with_sequence_parallel(sequence_parallel),
                        micro_batch: Some(2 / data),
                    };
                    if tensor > 1 || !sequence_parallel {
                        layouts.push(layout);
                    }
                }
            }
        }
        layouts
    }

    /// Returns layouts with two and four pipeline ranks and every pipeline schedule. Some layouts also have tensor,
    /// sequence and data parallelism. The model must have eight layers, and a step must have eight samples.
    pub fn pipelines() -> Vec<Self> {
        parsed(&[
            "pp2-mb2/gpipe",
            "pp2-mb2/1f1b",
            "pp2-mb2/eager-1f1b",
            "pp2-mb2/interleaved",
            "pp2-mb2/zb-h1",
            "pp2-mb2/zb-v",
            "pp2-mb2/dualpipe-v",
            "pp4-mb1/1f1b",
            "pp4-mb1/interleaved",
            "pp4-mb1/zb-v",
            "tp2-sp-pp2-mb2/zb-h1",
            "tp2-pp2-dp2-mb1/1f1b",
            "tp2-sp-pp2-dp2-mb1/interleaved",
        ])
    }

    /// Returns layouts with the ZeRO stages 1 to 3 and hybrid sharding over the data axis. Some layouts also have
    /// tensor, sequence and pipeline parallelism. The model must have eight layers, and a step must have eight samples.
    pub fn sharded() -> Vec<Self> {
        parsed(&[
            "dp4-mb1-z1",
            "dp4-mb1-z2",
            "dp4-mb1-z3",
            "dp4-mb2-z1-hsdp2",
            "dp4-mb2-z3-hsdp2",
            "tp2-dp2-mb2-z3",
            "tp4-sp-dp2-mb2-z1",
            "tp2-sp-dp2-mb2-z2",
            "tp2-pp2-dp2-mb1-z1/1f1b",
            "tp2-sp-pp2-dp2-mb1-z2/interleaved",
            "tp2-pp2-dp2-mb1-z3/1f1b",
            "pp2-dp4-mb1-z3-hsdp2/zb-v",
        ])
    }

    /// Returns layouts with expert parallelism and expert tensor parallelism, combined with all other kinds of
    /// parallelism except context parallelism. The model must have eight layers and four experts, and a step must have
    /// eight samples.
    pub fn experts() -> Vec<Self> {
        parsed(&[
            "dp2-mb1",
            "ep2-dp2-mb2",
            "ep4-dp4-mb1",
            "ep2-etp2-dp4-mb2",
            "tp2-sp-dp2-mb2",
            "tp2-sp-etp1-dp2-mb2",
            "tp2-sp-ep2-etp1-dp2-mb2",
            "tp2-ep2-dp2-mb2",
            "tp2-sp-ep4-dp4-mb1",
            "ep2-pp2-dp2-mb2/1f1b",
            "ep2-pp2-dp2-mb1/zb-v",
            "tp2-sp-ep2-pp2-dp2-mb1-z1/interleaved",
            "ep2-dp4-mb1-z1",
            "ep2-dp4-mb1-z2",
            "tp2-sp-ep2-dp4-mb1-z3",
            "ep2-dp4-mb1-z3-hsdp2",
            "ep4-dp4-mb1-node2",
            "tp2-sp-ep2-dp4-mb1-z1-node4",
        ])
    }

    /// Returns layouts with context parallelism, for each exchange method and each split of the sequence. Some layouts
    /// also have tensor, sequence, pipeline and data parallelism. The model must have eight layers and four heads, and
    /// a step must have eight samples of sixteen tokens.
    pub fn contexts() -> Vec<Self> {
        parsed(&[
            "cp2-ring-dp1-mb2",
            "cp2-allgather-dp1-mb2",
            "cp2-alltoall-dp1-mb2",
            "cp4-ring-dp1-mb4",
            "cp4-ring-striped-dp1-mb4",
            "cp4-ring-contiguous-dp1-mb4",
            "cp4-allgather-striped-dp1-mb4",
            "cp4-usp2-dp1-mb4",
            "cp4-dp1-mb8",
            "tp2-cp2-ring-dp2-mb2",
            "tp2-sp-cp2-ring-dp2-mb2",
            "tp2-sp-cp2-alltoall-contiguous-dp1-mb2",
            "cp2-ring-pp2-dp1-mb2/1f1b",
            "tp2-sp-cp2-allgather-pp2-dp1-mb2/interleaved",
            "cp2-ring-dp2-mb2-z1",
            "cp2-ring-dp2-mb2-z2",
            "tp2-sp-cp2-ring-dp2-mb2-z3",
            "cp2-alltoall-dp2-mb2-z3-hsdp2",
        ])
    }

    /// Returns layouts with each method of overlapping tensor-parallel communication. Some layouts also have context,
    /// pipeline and data parallelism. The model must have eight layers and four heads, and a step must have eight
    /// samples of sixteen tokens.
    pub fn overlaps() -> Vec<Self> {
        parsed(&[
            "tp2-sp-tpring-dp2-mb2",
            "tp4-sp-tpring2-dp1-mb4",
            "tp2-sp-tpbulk-dp2-mb2",
            "tp4-sp-tpbulk2-dp1-mb4",
            "tp2-sp-tpring-cp2-ring-dp1-mb4",
            "tp2-sp-tpring-pp2-dp1-mb2/zb-h1",
            "tp2-sp-tpbulk4-pp2-dp1-mb2/zb-v",
            "tp2-sp-tpbulk-pp2-dp2-mb1-z1/interleaved",
            "tp2-sp-tpring-dp2-mb2-z2",
            "tp2-sp-tpbulk2-dp2-mb2-z3",
        ])
    }
}

/// Parses names that [`Layout`] writes. The tests read them back.
fn parsed(names: &[&str]) -> Vec<Layout> {
    names.iter().filter_map(|name| name.parse().ok()).collect()
}
