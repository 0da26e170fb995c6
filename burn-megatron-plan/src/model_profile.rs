//! The profiles of all layers of a model on a rank. The profile of any pipeline stage follows from them.

use super::profile::{ELEMENT, LayerProfile};
use burn_megatron::mesh::{Grid, stages::StageLayout};

/// Elements on a rank, by the grid over whose data axis they are reduced and sharded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GridElements {
    /// Elements of experts.
    pub expert: u64,
    /// All other elements.
    pub dense: u64,
}

impl GridElements {
    /// Returns the elements of a grid.
    pub fn of(&self, grid: Grid) -> u64 {
        match grid {
            Grid::Dense => self.dense,
            Grid::Expert => self.expert,
        }
    }

    /// Adds `times` times the elements of another part.
    pub fn add(&mut self, other: Self, times: u64) {
        self.expert += times * other.expert;
        self.dense += times * other.dense;
    }
}

/// A layer of a rank, with its parameters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockProfile {
    /// The computation, the exchanges and the saved tensors of the layer.
    pub layer: LayerProfile,
    /// The parameter elements of the layer on the rank.
    pub parameters: GridElements,
}

impl BlockProfile {
    /// Adds a part that runs after this part. Does not change the output size.
    pub fn add(&mut self, other: &Self) {
        self.layer.add(&other.layer);
        self.parameters.add(other.parameters, 1);
    }
}

/// The profile of a model on a rank of a tensor, context and expert layout, for micro-batches of one size. It is the
/// same for all pipeline stages and all ranks of the data axis.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelProfile {
    /// The embedding, on the first stage.
    pub embedding: BlockProfile,
    /// The distinct layers.
    pub kinds: Vec<BlockProfile>,
    /// The kind of each layer, an index into `kinds`.
    pub layers: Vec<usize>,
    /// The last norm, the output layer and the loss, on the last stage.
    pub output: BlockProfile,
    /// Elements of the output layer that are shared with the embedding, if the two are tied.
    pub tied: u64,
}

impl ModelProfile {
    /// Scales a 16-bit profile to a model whose elements have `bytes` bytes.
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

    /// Returns the bytes of a message between two stages.
    pub fn message_bytes(&self) -> u64 {
        self.kinds.first().map_or(0, |kind| kind.layer.output_bytes)
    }

    /// Returns the number of layers of each kind in a stage.
    pub fn counts(&self, stage: &StageLayout) -> Vec<usize> {
        let mut counts = vec![0; self.kinds.len()];
        for kind in &self.layers[stage.layers.clone()] {
            counts[*kind] += 1;
        }
        counts
    }

    /// Returns the blocks of a stage, each with its number of occurrences.
    pub fn blocks(&self, stage: &StageLayout) -> impl Iterator<Item = (&BlockProfile, usize)> {
        let ends = [
            (&self.embedding, stage.embedding as usize),
            (&self.output, stage.loss as usize),
        ];
        let layers = self.kinds.iter().zip(self.counts(stage));
        ends.into_iter().chain(layers).filter(|(_, n)| *n > 0)
    }

    /// Returns the parameter elements of a rank with these stages.
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
