//! The slices of an MLP that experts have.

use burn_megatron::checkpoint::TensorSlice;

/// A tensor of experts, `[experts, ...]`, as slices of a tensor of an MLP.
pub(super) struct ExpertSlices {
    /// The key of the MLP's tensor.
    pub key: String,
    /// Its dim that is cut; without one each expert has the whole tensor.
    pub dim: Option<usize>,
    /// The factors of the sections of that dim, of equal widths: gate and value.
    pub factors: Vec<f64>,
    /// The number of slices of each section.
    pub granularity: usize,
}

/// A part of a tensor of experts.
pub(super) struct ExpertPart {
    /// Its elements in the tensor of experts.
    pub own: TensorSlice,
    /// The same in the tensor of the MLP.
    pub dense: TensorSlice,
    /// The factor of these tensors.
    pub factor: f64,
}

impl ExpertSlices {
    /// The parts of a slice of a tensor of experts with this shape.
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

    /// A section of an expert.
    fn section(&self, shape: &[usize], expert: usize, section: usize) -> TensorSlice {
        let mut whole = TensorSlice::whole(shape);
        (whole.offset[0], whole.shape[0]) = (expert, 1);
        if let Some(dim) = self.dim {
            let width = shape[dim + 1] / self.factors.len();
            (whole.offset[dim + 1], whole.shape[dim + 1]) = (section * width, width);
        }
        whole
    }

    /// A part of a section in the tensor of the MLP.
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
