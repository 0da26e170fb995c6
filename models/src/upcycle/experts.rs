//! The slices of a dense MLP from which experts are created.

use burn_megatron::checkpoint::TensorSlice;

/// Describes how a tensor of experts, `[experts, ...]`, consists of slices of a tensor of the dense MLP.
pub(super) struct ExpertSlices {
    /// The key of the tensor of the dense MLP.
    pub key: String,
    /// The dimension that is sliced. With `None`, each expert gets the complete tensor.
    pub dim: Option<usize>,
    /// The factor of each section of the sliced dimension. The sections are gate and value, which have equal widths.
    pub factors: Vec<f64>,
    /// The number of slices into which each section is split.
    pub granularity: usize,
}

/// A part of a tensor of experts that is a slice of a tensor of the dense MLP.
pub(super) struct ExpertPart {
    /// The slice of the tensor of experts.
    pub own: TensorSlice,
    /// The slice of the tensor of the dense MLP.
    pub dense: TensorSlice,
    /// The factor that the values are multiplied with.
    pub factor: f64,
}

impl ExpertSlices {
    /// Divides a slice of a tensor of experts into parts. `shape` is the shape of the tensor of experts.
    pub fn parts(&self, shape: &[usize], slice: &TensorSlice) -> Vec<ExpertPart> {
        let mut parts = vec![];
        for expert in slice.range(0) {
            for (section, factor) in self.factors.iter().enumerate() {
                let whole = self.section(shape, expert, section);
                if let Some(own) = whole.intersection(slice) {
                    let dense = self.dense(&own, expert, section, &whole);
                    parts.push(ExpertPart {
                        own,
                        dense,
                        factor: *factor,
                    });
                }
            }
        }
        parts
    }

    /// Returns the slice of the tensor of experts for one section of one expert.
    fn section(&self, shape: &[usize], expert: usize, section: usize) -> TensorSlice {
        let mut whole = TensorSlice::whole(shape);
        (whole.offset[0], whole.shape[0]) = (expert, 1);
        if let Some(dim) = self.dim {
            let width = shape[dim + 1] / self.factors.len();
            (whole.offset[dim + 1], whole.shape[dim + 1]) = (section * width, width);
        }
        whole
    }

    /// Returns the slice of the tensor of the dense MLP that corresponds to a part of a section.
    fn dense(
        &self,
        own: &TensorSlice,
        expert: usize,
        section: usize,
        whole: &TensorSlice,
    ) -> TensorSlice {
        let mut dense = TensorSlice {
            offset: own.offset[1..].to_vec(),
            shape: own.shape[1..].to_vec(),
        };
        if let Some(dim) = self.dim {
            let slice = section * self.granularity + expert % self.granularity;
            dense.offset[dim] += slice * whole.shape[dim + 1] - whole.offset[dim + 1];
        }
        dense
    }
}
