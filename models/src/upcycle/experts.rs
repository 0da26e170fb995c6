//! The slices of an MLP from which experts are made.

use burn_megatron::checkpoint::TensorSlice;

/// A tensor of experts, `[experts, ...]`, as slices of a tensor of an MLP.
pub(super) struct ExpertSlices {
    /// The key of the MLP's tensor.
    pub key: String,
    /// The dim that is sliced. `None` gives the complete tensor to each expert.
    pub dim: Option<usize>,
    /// The factors of the sections of the sliced dim (gate and value), which have equal widths.
    pub factors: Vec<f64>,
    /// The number of slices of each section.
    pub granularity: usize,
}

/// A part of a tensor of experts.
pub(super) struct ExpertPart {
    /// The slice of the tensor of experts.
    pub own: TensorSlice,
    /// The slice of the tensor of the MLP.
    pub dense: TensorSlice,
    /// The factor that is applied to the values.
    pub factor: f64,
}

impl ExpertSlices {
    /// Returns the parts of a slice of a tensor of experts with this shape.
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

    /// Returns a section of an expert.
    fn section(&self, shape: &[usize], expert: usize, section: usize) -> TensorSlice {
        let mut whole = TensorSlice::whole(shape);
        (whole.offset[0], whole.shape[0]) = (expert, 1);
        if let Some(dim) = self.dim {
            let width = shape[dim + 1] / self.factors.len();
            (whole.offset[dim + 1], whole.shape[dim + 1]) = (section * width, width);
        }
        whole
    }

    /// Returns the slice of the MLP's tensor for a part of a section.
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
