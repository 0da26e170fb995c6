//! The layouts of a search whose sizes fit.

use std::collections::HashMap;
use std::rc::Rc;

use crate::mesh::{Mesh, ParallelConfig, samples_per_rank};

use super::super::time::ModelSeconds;
use super::super::{MeshLinks, ModelProfile, Recompute};
use super::{Rejection, Search};

/// A layout of the mesh with a micro-batch and a kind of recomputation, before its schedule and sharding are chosen.
pub(super) struct Entry {
    /// As a recipe has it.
    pub layout: ParallelConfig,
    pub mesh: Rc<Mesh>,
    pub profile: Rc<ModelProfile>,
    pub micro_batch: usize,
    pub micro_batches: usize,
    pub recompute: Recompute,
    /// Its schedules times its shardings.
    pub settings: u64,
    /// No schedule and sharding of it is faster.
    pub bound: f64,
}

impl Entry {
    /// The sizes of the axes.
    pub fn sizes(&self) -> [usize; 5] {
        let layout = &self.layout;
        let expert = [layout.expert, layout.expert_tensor_size()];
        [
            layout.tensor,
            layout.context,
            layout.pipeline,
            expert[0],
            expert[1],
        ]
    }
}

impl Search<'_> {
    /// Every entry whose sizes fit; the others are counted.
    pub(super) fn entries(&mut self) -> Vec<Entry> {
        let config = self.config;
        let mut entries = vec![];
        let mut profiles = HashMap::new();
        for layout in config
            .fixed
            .layouts(config.devices, self.model.has_experts())
        {
            let data = layout.data_size();
            let share = config.global_batch / data;
            let sizes = config.fixed.micro_batches(share.max(1));
            let settings = self.settings(&layout);
            let each = settings * config.fixed.recomputes().len() as u64;
            self.counts.candidates += each * sizes.len() as u64;
            let mut reject = |reason, candidates, text: String| {
                self.counts.add(reason, candidates, Some(text));
            };
            let all = each * sizes.len() as u64;
            // Before the mesh, whose groups take time on many devices.
            if let Err(error) = self.model.check(&layout) {
                reject(Rejection::Model, all, error);
                continue;
            }
            let mesh = match Mesh::new(&layout, config.devices) {
                Ok(mesh) => Rc::new(mesh),
                Err(error) => {
                    reject(Rejection::Mesh, all, error.to_string());
                    continue;
                }
            };
            let links = MeshLinks::new(&mesh, config.hardware);
            for micro_batch in sizes {
                let share = samples_per_rank(config.global_batch, data, Some(micro_batch));
                let share = match share {
                    Ok(share) => share,
                    Err(error) => {
                        reject(Rejection::Batch, each, error.to_string());
                        continue;
                    }
                };
                let own = mesh.config();
                let splits = (own.tensor, own.sequence_parallel, own.context);
                let key = (splits, own.expert, own.expert_tensor, micro_batch);
                let profile = profiles
                    .entry(key)
                    .or_insert_with(|| self.model.profile(own, micro_batch).map(Rc::new));
                let profile = match profile {
                    Ok(profile) => profile.clone(),
                    Err(error) => {
                        reject(Rejection::Model, each, error.clone());
                        continue;
                    }
                };
                for recompute in config.fixed.recomputes() {
                    let seconds = ModelSeconds::new(&profile, &self.rates, &links, recompute);
                    let micro_batches = share / micro_batch;
                    let of_rank = seconds.whole(&profile) / own.pipeline as f64;
                    entries.push(Entry {
                        layout: layout.clone(),
                        mesh: mesh.clone(),
                        profile: profile.clone(),
                        micro_batch,
                        micro_batches,
                        recompute,
                        settings,
                        bound: of_rank * micro_batches as f64,
                    });
                }
            }
        }
        entries
    }
}
