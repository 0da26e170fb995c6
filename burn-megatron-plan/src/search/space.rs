//! The search space: all possible axis sizes and other settings of a layout.

use burn_megatron::mesh::{ParallelConfig, ScheduleKind, ZeroStage, stages::LayerSplit};

use super::super::Recompute;

/// The settings of a search that have a fixed value. A setting that is `None` is searched.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FixedSettings {
    /// The tensor-parallel size.
    pub tensor: Option<usize>,
    /// Whether sequence parallelism is used.
    pub sequence_parallel: Option<bool>,
    /// The settings of the layout that are never searched: the number of ranks per node, and the communication overlap.
    /// Overlap is used only in layouts that support it.
    pub given: ParallelConfig,
    /// The context-parallel size.
    pub context: Option<usize>,
    /// The pipeline-parallel size.
    pub pipeline: Option<usize>,
    /// The pipeline schedule.
    pub schedule: Option<ScheduleKind>,
    /// The number of pipeline stages per rank (virtual stages).
    pub virtual_stages: Option<usize>,
    /// The expert-parallel size.
    pub expert: Option<usize>,
    /// The number of ranks over which each expert is split (expert tensor parallelism).
    pub expert_tensor: Option<usize>,
    /// The data-parallel size.
    pub data: Option<usize>,
    /// The ZeRO stage, which determines the training state that is sharded over the data axis.
    pub zero_stage: Option<ZeroStage>,
    /// The number of ranks in a sharding group (HSDP). If it equals the size of the data axis, there is one group.
    pub hsdp: Option<usize>,
    /// The number of samples in a micro-batch.
    pub micro_batch: Option<usize>,
    /// The kind of activation recomputation.
    pub recompute: Option<Recompute>,
    /// The share of the optimizer state that is offloaded to the host, from 0 to 1. With 0, activations are not
    /// offloaded either.
    pub offload: Option<f64>,
}

/// A pipeline schedule and the number of stages per rank, or `None` without pipeline parallelism.
pub type PipelineSettings = Option<(ScheduleKind, usize)>;

/// A ZeRO stage and the number of ranks in a sharding group. `None` means that the whole data axis is one sharding
/// group.
pub type ShardingSettings = (ZeroStage, Option<usize>);

/// Returns the divisors of a number in ascending order.
pub fn divisors(n: usize) -> Vec<usize> {
    let small: Vec<_> = (1..=n.isqrt())
        .filter(|size| n.is_multiple_of(*size))
        .collect();
    let large = small.iter().rev().map(|size| n / size);
    let large = large.filter(|size| size * size > n);
    small.iter().copied().chain(large).collect()
}

impl FixedSettings {
    /// Returns all factorizations of `devices` over the parallel axes, with and without sequence parallelism. For a
    /// model with experts, they are combined with all factorizations over the axes of the expert grid.
    pub fn layouts(&self, devices: usize, has_experts: bool) -> Vec<ParallelConfig> {
        let mut layouts = vec![];
        let of = |fixed: Option<usize>, n: usize| sizes(fixed, n);
        for tensor in of(self.tensor, devices) {
            for context in of(self.context, devices / tensor) {
                for pipeline in of(self.pipeline, devices / tensor / context) {
                    let data = devices / tensor / context / pipeline;
                    if self.data.is_some_and(|fixed| fixed != data) {
                        continue;
                    }
                    let layout = ParallelConfig::new()
                        .with_tensor(tensor)
                        .with_context(context)
                        .with_pipeline(pipeline)
                        .with_data(data);
                    let experts = if has_experts {
                        self.expert_layouts(&layout, devices)
                    } else {
                        vec![layout]
                    };
                    for layout in experts {
                        let splits = self.sequence(tensor).into_iter();
                        layouts.extend(splits.map(|split| self.with_given(&layout, split)));
                    }
                }
            }
        }
        layouts
    }

    fn expert_layouts(&self, layout: &ParallelConfig, devices: usize) -> Vec<ParallelConfig> {
        let ranks = devices / layout.pipeline;
        let mut layouts = vec![];
        for tensor in sizes(self.expert_tensor, ranks) {
            for expert in sizes(self.expert, ranks / tensor) {
                let layout = layout.clone().with_expert(expert);
                layouts.push(if tensor == layout.tensor {
                    layout
                } else {
                    layout.with_expert_tensor(tensor)
                });
            }
        }
        layouts
    }

    fn with_given(&self, layout: &ParallelConfig, split: bool) -> ParallelConfig {
        ParallelConfig {
            sequence_parallel: split,
            ranks_per_node: self.given.ranks_per_node,
            overlap_moe_expert_parallel_comm: layout.expert > 1
                && self.given.overlap_moe_expert_parallel_comm,
            tp_comm_overlap: self.given.tp_comm_overlap.filter(|_| split),
            tp_comm_overlap_num_splits: self.given.tp_comm_overlap_num_splits.filter(|_| split),
            ..layout.clone()
        }
    }

    fn sequence(&self, tensor: usize) -> Vec<bool> {
        let all = if tensor == 1 {
            &[false][..]
        } else {
            &[true, false]
        };
        let all = all.iter().copied();
        all.filter(|split| {
            tensor == 1 || self.sequence_parallel.is_none_or(|fixed| fixed == *split)
        })
        .collect()
    }

    /// Returns the schedules to try for a pipeline of `ranks` ranks and a model of `layers` layers. The interleaved
    /// schedule is returned once for each possible number of stages per rank.
    pub fn pipelines(&self, ranks: usize, layers: usize) -> Vec<PipelineSettings> {
        if ranks == 1 {
            return vec![None];
        }
        let kinds = ScheduleKind::ALL.into_iter();
        let kinds = kinds.filter(|kind| self.schedule.is_none_or(|fixed| fixed == *kind));
        let settings = kinds.flat_map(|kind| match kind {
            ScheduleKind::Interleaved { .. } => {
                let stages = (1..=layers).map(|each| layers.div_ceil(ranks * each));
                let mut stages: Vec<_> = stages.filter(|v| *v > 1).collect();
                stages.dedup();
                stages.into_iter().map(|v| Some((kind, v))).collect()
            }
            kind => vec![Some((kind, kind.default_virtual_stages()))],
        });
        let fits = |settings: &PipelineSettings| {
            let stages = settings.map(|(_, stages)| stages);
            self.virtual_stages.is_none() || self.virtual_stages == stages
        };
        let mut settings: Vec<_> = settings.filter(fits).collect();
        // The schedule that holds the most activations comes last.
        settings.sort_by_key(|settings| matches!(settings, Some((ScheduleKind::GPipe, _))));
        settings
    }

    /// Returns the micro-batch sizes to try. They are the divisors of `samples`, the number of samples per
    /// data-parallel replica.
    pub fn micro_batches(&self, samples: usize) -> Vec<usize> {
        if let Some(fixed) = self.micro_batch {
            return vec![fixed];
        }
        divisors(samples)
    }

    /// Returns the shardings to try for a data axis of `ranks` ranks: no sharding, and ZeRO-1 to ZeRO-3 with each size
    /// of a sharding group.
    pub fn shardings(&self, ranks: usize) -> Vec<ShardingSettings> {
        let stages = [
            ZeroStage::Replicated,
            ZeroStage::Optimizer,
            ZeroStage::Gradients,
            ZeroStage::Parameters,
        ];
        let stages = stages.into_iter();
        let stages = stages.filter(|stage| self.zero_stage.is_none_or(|fixed| fixed == *stage));
        let mut shardings = vec![];
        for stage in stages {
            let groups = match (stage, self.hsdp) {
                (ZeroStage::Replicated, None) => vec![None],
                (ZeroStage::Replicated, Some(_)) => vec![],
                (_, Some(fixed)) if fixed == ranks => vec![None],
                (_, Some(fixed)) => vec![Some(fixed)],
                _ if ranks == 1 => vec![],
                _ => {
                    let inner = divisors(ranks).into_iter();
                    let inner = inner.filter(|size| (2..ranks).contains(size)).map(Some);
                    std::iter::once(None).chain(inner).collect()
                }
            };
            shardings.extend(groups.into_iter().map(|group| (stage, group)));
        }
        shardings
    }

    /// Returns the kinds of recomputation to try. If `has_host` is set, they include recomputation with offloaded
    /// inputs.
    pub fn recomputes(&self, has_host: bool) -> Vec<Recompute> {
        let offloads = has_host && self.offload != Some(0.0);
        let all = Recompute::ALL
            .into_iter()
            .filter(|kind| match self.recompute {
                Some(fixed) => fixed == *kind,
                None => offloads || *kind != Recompute::FullOffloaded,
            });
        all.collect()
    }

    /// Returns the shares of the optimizer state to offload to the host, in the order in which they are tried. The
    /// first share that fits into memory is used, because a larger share makes the step longer.
    pub fn offloads(&self, has_host: bool) -> &[f64] {
        match &self.offload {
            Some(fixed) => std::slice::from_ref(fixed),
            None if has_host => &[0.0, 0.25, 0.5, 0.75, 1.0],
            None => &[0.0],
        }
    }
}

/// Returns the possible sizes of an axis for `ranks` ranks. This is the fixed size, if it divides `ranks`. Without a
/// fixed size, these are all divisors.
fn sizes(fixed: Option<usize>, ranks: usize) -> Vec<usize> {
    match fixed {
        Some(size) if size > 0 && ranks.is_multiple_of(size) => vec![size],
        Some(_) => vec![],
        None => divisors(ranks),
    }
}

/// Returns the split of layers over pipeline stages. If the number of layers is a multiple of the number of stages, all
/// stages get the same number of layers. Otherwise the first and the last stage get fewer layers than the other stages,
/// and the last stage gets the fewest.
pub fn split(layers: usize, stages: usize) -> LayerSplit {
    if stages < 3 || layers.is_multiple_of(stages) {
        return LayerSplit::Even;
    }
    let each = layers.div_ceil(stages);
    match layers.checked_sub(each * (stages - 2)) {
        Some(ends) => LayerSplit::Ends {
            first: Some(ends.div_ceil(2)),
            last: Some(ends / 2),
        },
        None => LayerSplit::Even,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_megatron::pipeline::stages_of;

    #[test]
    fn divisors_are_all_and_in_order() {
        for n in 0..200 {
            let all: Vec<_> = (1..=n).filter(|size| n % size == 0).collect();
            assert_eq!(divisors(n), all);
        }
    }

    #[test]
    fn every_factorisation_is_a_layout() {
        let free = FixedSettings::default();
        // 4 = t c p d has ten solutions. Three of them have the tensor size 2, and one has the tensor size 4. These
        // four exist with and without sequence parallelism.
        assert_eq!(free.layouts(4, false).len(), 10 + 4);
        let fixed = FixedSettings {
            tensor: Some(2),
            sequence_parallel: Some(true),
            data: Some(1),
            ..FixedSettings::default()
        };
        assert_eq!(fixed.layouts(4, false).len(), 2);
        let odd = FixedSettings {
            tensor: Some(3),
            ..FixedSettings::default()
        };
        assert!(odd.layouts(4, false).is_empty());
        let experts = free.layouts(2, true);
        // One layout for each of tensor, context, pipeline and data. Two ranks of a stage have three expert grids.
        assert_eq!(experts.len(), 3 * 2 + 3 + 1 + 3);
    }

    #[test]
    fn layers_that_stages_do_not_divide_leave_fewer_at_the_ends() {
        let ends = |first, last| LayerSplit::Ends {
            first: Some(first),
            last: Some(last),
        };
        assert_eq!(split(126, 64), ends(1, 1));
        assert_eq!(split(94, 16), ends(5, 5));
        assert_eq!(split(94, 32), ends(2, 2));
        assert_eq!(split(80, 40), LayerSplit::Even);
        for (layers, stages, ranks) in [(126, 64, 8), (94, 32, 8), (126, 16, 16)] {
            let layout = ParallelConfig::new()
                .with_pipeline(ranks)
                .with_schedule(ScheduleKind::Interleaved { group: None })
                .with_virtual_stages(stages / ranks)
                .with_split(split(layers, stages));
            assert_eq!(stages_of(&layout, layers).unwrap().len(), stages);
        }
    }

    #[test]
    fn settings_are_those_that_have_an_effect() {
        let free = FixedSettings::default();
        assert_eq!(free.micro_batches(12), [1, 2, 3, 4, 6, 12]);
        assert_eq!(free.shardings(1), [(ZeroStage::Replicated, None)]);
        assert_eq!(free.shardings(4).len(), 1 + 3 * 2);
        for (ranks, group) in [(4, None), (8, Some(4))] {
            let fixed = FixedSettings {
                zero_stage: Some(ZeroStage::Optimizer),
                hsdp: Some(4),
                ..FixedSettings::default()
            };
            assert_eq!(fixed.shardings(ranks), [(ZeroStage::Optimizer, group)]);
        }
        assert_eq!(free.pipelines(1, 8), [None]);
        // Six kinds with a default number of stages, and the interleaved kind with 4 and 2 stages (one and two layers
        // per stage).
        assert_eq!(free.pipelines(2, 8).len(), 6 + 2);
    }
}
