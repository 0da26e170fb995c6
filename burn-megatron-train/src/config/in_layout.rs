//! Checks the settings of a run against a layout.

use super::{ConfigError, TrainConfig};
use crate::hooks::{cuda_graphs, hybrid_context};
use burn_megatron::data_parallel::DataParallelConfig;
use burn_megatron::mesh::{ParallelConfig, samples_per_rank};

impl TrainConfig {
    /// Checks all settings for a layout and a model. `context` is the maximum sequence length of the model, in tokens.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] for the first invalid setting.
    pub fn check(&self, layout: &ParallelConfig, context: usize) -> Result<(), ConfigError> {
        self.check_without_layout(context)?;
        let data = layout.data_size();
        for samples in self.batch_sizes() {
            samples_per_rank(samples, data, Some(self.micro_batch_size))?;
        }
        let length = self.sequence_length.unwrap_or(context);
        hybrid_context::check(self, layout, (length, context))?;
        if self.cuda_graph {
            cuda_graphs::check(self, layout)?;
        }
        Ok(self.data_parallel.check(layout.data_parallel_size())?)
    }

    /// Returns the settings with the sharding of the layout.
    pub(crate) fn in_layout(&self, layout: &ParallelConfig) -> Result<Self, ConfigError> {
        Ok(Self {
            data_parallel: DataParallelConfig {
                state_tensors: self.state_tensors(),
                static_buffers: self.cuda_graph,
                freeze: self.freeze.clone(),
                ..self.data_parallel.in_layout(layout)?
            },
            ..self.clone()
        })
    }
}
