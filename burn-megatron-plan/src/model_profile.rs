//! The profiles of all layers of a model on a rank. The planner combines them to the profile of any pipeline stage.

use super::profile::{ELEMENT, LayerProfile};
use burn_megatron::mesh::{Grid, stages::StageLayout};

/// Numbers of parameter elements on a rank. Expert parameters and dense parameters are counted separately, because they
/// are reduced and sharded over different groups of ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GridElements {
    /// The number of elements of expert parameters.
    pub expert: u64,
    /// The number of elements of all other parameters.
    pub dense: u64,
}

impl GridElements {
    /// Returns the number of elements that belong to a grid: the dense parameters or the expert parameters.
    pub fn of(&self, grid: Grid) -> u64 {
        match grid {
            Grid::Dense => self.dense,
            Grid::Expert => self.expert,
        }
    }

    /// Adds the elements of `other`, multiplied by `times`.
    pub fn add(&mut self, other: Self, times: u64) {
        self.expert += times * other.expert;
        self.dense += times * other.dense;
    }
}

/// The profile of a layer on a rank, with the size of its parameters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockProfile {
    /// The computation, the communication and the saved tensors of the layer.
    pub layer: LayerProfile,
    /// The number of parameter elements of the layer on the rank.
    pub parameters: GridElements,
}

impl BlockProfile {
    /// Adds the costs of another part of the layer, which runs after this part. The output size of this profile is not
    /// changed.
    pub fn add(&mut self, other: &Self) {
        self.layer.add(&other.layer);
        self.parameters.add(other.parameters, 1);
    }
}

/// The profile of a model on one rank, for a given micro-batch size and given sizes of the tensor, context and expert
/// axes. It contains all layers of the model, so it can be used for any pipeline stage and any data-parallel rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelProfile {
    /// The embedding, which is on the first pipeline stage.
    pub embedding: BlockProfile,
    /// The profiles of the distinct kinds of layers.
    pub kinds: Vec<BlockProfile>,
    /// The kind of each layer, as an index into `kinds`.
    pub layers: Vec<usize>,
    /// The last norm, the output layer and the loss, which are on the last pipeline stage.
    pub output: BlockProfile,
    /// The number of elements of the output layer that are shared with the embedding. 0 if the output layer is not tied
    /// to the embedding.
    pub tied: u64,
}

impl ModelProfile {
    /// Converts the profile of a 16-bit model to the profile of a model whose elements have `bytes` bytes.
    pub fn with_element_bytes(mut self, bytes: u64) -> Self {
        let scale = |size: &mut u64| *size = *size / ELEMENT * bytes;
        let ends = [&mut self.embedding, &mut self.output];
        for block in ends.into_iter().chain(&mut self.kinds) {
            let layer = &mut block.layer;
            layer
                .saved
                .iter_mut()
                .for_each(|tensor| scale(&mut tensor.bytes));
            let exchanges = layer.exchanges.iter_mut();
            exchanges.for_each(|exchange| scale(&mut exchange.bytes));
            scale(&mut layer.streamed_bytes);
            scale(&mut layer.output_bytes);
            scale(&mut layer.backward_bytes);
        }
        self
    }

    /// Returns the size of a message between two pipeline stages, in bytes.
    pub fn message_bytes(&self) -> u64 {
        self.kinds.first().map_or(0, |kind| kind.layer.output_bytes)
    }

    /// Returns the number of layers of each kind in a pipeline stage.
    pub fn counts(&self, stage: &StageLayout) -> Vec<usize> {
        let mut counts = vec![0; self.kinds.len()];
        for kind in &self.layers[stage.layers.clone()] {
            counts[*kind] += 1;
        }
        counts
    }

    /// Returns the distinct layers of a pipeline stage, each with its number of occurrences.
    pub fn blocks(&self, stage: &StageLayout) -> impl Iterator<Item = (&BlockProfile, usize)> {
        let ends = [
            (&self.embedding, stage.embedding as usize),
            (&self.output, stage.loss as usize),
        ];
        let layers = self.kinds.iter().zip(self.counts(stage));
        ends.into_iter().chain(layers).filter(|(_, n)| *n > 0)
    }

    /// Returns the number of parameter elements of a rank with the given pipeline stages.
    pub fn parameters<'a>(
        &self,
        stages: impl IntoIterator<Item = &'a StageLayout> + Clone,
    ) -> GridElements {
        let mut sum = GridElements::default();
        for (block, n) in stages
            .clone()
            .into_iter()
            .flat_map(|stage| self.blocks(stage))
        {
            sum.add(block.parameters, n as u64);
        }
        let has = |end: fn(&StageLayout) -> bool| stages.clone().into_iter().any(end);
        if has(|stage| stage.embedding) && has(|stage| stage.loss) {
            sum.dense -= self.tied;
        }
        sum
    }
}
