//! The entries of a search: layouts that are valid for the mesh and the model.

use std::sync::Arc;

use rayon::prelude::*;

use burn_megatron::mesh::{Mesh, ParallelConfig, samples_per_rank};

use super::super::time::{DeviceRates, ModelSeconds};
use super::super::{MeshLinks, ModelProfile, Recompute};
use super::cache::Cache;
use super::{PlannedModel, Rejection, SearchConfig, SearchCounts, Sizes, sizes_of};

/// An entry of a search: a layout with a micro-batch size and a kind of recomputation. Its schedule and sharding are
/// not yet selected.
pub(super) struct Entry<'a> {
    /// The parallel layout, as in a recipe.
    pub layout: Arc<ParallelConfig>,
    pub links: Arc<MeshLinks<'a>>,
    pub profile: Arc<ModelProfile>,
    pub micro_batch: usize,
    pub micro_batches: usize,
    pub recompute: Recompute,
    /// Whether [`Recompute::FullOffloaded`] is tried for settings that do not fit into memory.
    pub with_offloaded: bool,
    /// The number of candidates in this entry: the number of schedules times the number of shardings.
    pub settings: u64,
    /// A lower bound of the step time for all schedules and shardings of the entry.
    pub bound: f64,
}

impl Entry<'_> {
    /// Returns the sizes of the axes.
    pub fn sizes(&self) -> Sizes {
        sizes_of(&self.layout)
    }
}

/// The key of a profile: tensor-parallel size, sequence parallelism, context, expert and expert tensor sizes, and
/// micro-batch size.
type ProfileKey = (usize, bool, usize, usize, Option<usize>, usize);

/// The source of the entries of a search.
pub(super) struct EntrySource<'s, 'a> {
    model: &'a dyn PlannedModel,
    config: &'a SearchConfig<'a>,
    rates: &'s DeviceRates<'a>,
    profiles: Cache<ProfileKey, ProfileResult>,
}

type ProfileResult = Result<Arc<ModelProfile>, String>;

impl<'s, 'a> EntrySource<'s, 'a> {
    pub fn new(
        model: &'a dyn PlannedModel,
        config: &'a SearchConfig<'a>,
        rates: &'s DeviceRates<'a>,
    ) -> Self {
        Self {
            model,
            config,
            rates,
            profiles: Cache::default(),
        }
    }

    /// Returns all entries that are valid, in the order of the layouts. All other candidates are counted as rejected.
    pub fn all(&self) -> (Vec<Entry<'a>>, SearchCounts) {
        let (fixed, devices) = (&self.config.fixed, self.config.devices);
        let layouts = fixed.layouts(devices, self.model.has_experts());
        let of_layouts = layouts.into_par_iter().map(|layout| self.entries(layout));
        let of_layouts: Vec<_> = of_layouts.collect();
        let (mut entries, mut counts) = (vec![], SearchCounts::default());
        for (own, of_layout) in of_layouts {
            entries.extend(own);
            counts.extend(of_layout);
        }
        (entries, counts)
    }

    /// Returns the entries of a layout.
    fn entries(&self, layout: ParallelConfig) -> (Vec<Entry<'a>>, SearchCounts) {
        let config = self.config;
        let data = layout.data_size();
        let share = config.global_batch / data;
        let sizes = config.fixed.micro_batches(share.max(1));
        let pipelines = config
            .fixed
            .pipelines(layout.pipeline, self.model.layers())
            .len();
        let shardings = config.fixed.shardings(layout.data_parallel_size()).len();
        let settings = (pipelines * shardings) as u64;
        let mut recomputes = config.recomputes();
        let each = settings * recomputes.len() as u64;
        let with_offloaded = recomputes.ends_with(&[Recompute::Full, Recompute::FullOffloaded]);
        if with_offloaded {
            recomputes.pop();
        }
        let all = each * sizes.len() as u64;
        let mut counts = SearchCounts {
            candidates: all,
            ..SearchCounts::default()
        };
        let mesh = self
            .model
            .check(&layout)
            .map_err(|error| (Rejection::Model, error));
        let mesh = mesh.and_then(|()| {
            let mesh = Mesh::new(&layout, config.devices);
            mesh.map_err(|error| (Rejection::Mesh, error.to_string()))
        });
        let mesh = match mesh {
            Ok(mesh) => mesh,
            Err((reason, error)) => {
                counts.add(reason, all, Some(error));
                return (vec![], counts);
            }
        };
        let links = Arc::new(MeshLinks::new(&mesh, config.hardware));
        let layout = Arc::new(layout);
        let mut entries = vec![];
        for micro_batch in sizes {
            let share = samples_per_rank(config.global_batch, data, Some(micro_batch));
            let share = share.map_err(|error| (Rejection::Batch, error.to_string()));
            let profile = share.and_then(|share| {
                let profile = self.profile(mesh.config(), micro_batch);
                let profile = profile.map_err(|error| (Rejection::Model, error))?;
                Ok((share, profile))
            });
            let (share, profile) = match profile {
                Ok(found) => found,
                Err((reason, error)) => {
                    counts.add(reason, each, Some(error));
                    continue;
                }
            };
            let seconds = ModelSeconds::new(&profile, self.rates, &links);
            let micro_batches = share / micro_batch;
            entries.extend(recomputes.iter().map(|recompute| {
                let seconds = seconds.recomputed(*recompute, &profile, config.hardware);
                let whole = seconds.whole(&profile);
                let with_offloaded = with_offloaded && *recompute == Recompute::Full;
                Entry {
                    layout: layout.clone(),
                    links: links.clone(),
                    profile: profile.clone(),
                    micro_batch,
                    micro_batches,
                    recompute: *recompute,
                    with_offloaded,
                    settings: settings * (1 + with_offloaded as u64),
                    bound: whole / layout.pipeline as f64 * micro_batches as f64,
                }
            }));
        }
        (entries, counts)
    }

    fn profile(&self, layout: &ParallelConfig, micro_batch: usize) -> ProfileResult {
        let key = (
            layout.tensor,
            layout.sequence_parallel,
            layout.context,
            layout.expert,
            layout.expert_tensor,
            micro_batch,
        );
        let profile = || self.model.profile(layout, micro_batch).map(Arc::new);
        self.profiles.get(key, profile)
    }
}
