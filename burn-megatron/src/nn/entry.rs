//! The properties of one parameter of a model: its shape, its placement on every axis, and the reduction of its
//! gradient.

use serde::{Deserialize, Serialize};

use super::{Placement, Placements, TableError};
use crate::mesh::{Axis, AxisRank, AxisSet, Grid, Mesh, MeshRank};

/// The properties of one parameter of a model. They are the same on every rank that holds the parameter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParameterEntry {
    /// The path of the parameter in the module, such as `blocks.0.mlp.up.weight`.
    pub path: String,
    /// The shape of the full parameter, without padding.
    pub shape: Vec<usize>,
    /// The grid on whose axes the parameter is placed. This is the expert grid for the weights of experts, and the
    /// dense grid for all other parameters.
    pub grid: Grid,
    /// The placement of the parameter on the axes of the grid.
    pub placements: Placements,
    /// The axes of the grid over which the gradient must be summed. These are the [data axes](Grid::data_axes), and
    /// each axis whose ranks apply a replicated parameter to different parts of the sequence.
    pub sum_over: AxisSet,
    /// Whether the optimizer applies weight decay to the parameter.
    pub decay: bool,
    /// Whether the parameter is a matrix of a hidden layer, or a stack of such matrices. The Muon optimizer updates
    /// these parameters. The field is false for embeddings, output weights, norms and biases.
    #[serde(default)]
    pub hidden: bool,
    /// The pipeline stage on this rank that holds the parameter. The stage is 0 if there is only one stage.
    pub stage: usize,
    /// The ranks of the pipeline axis that hold a copy of the parameter, in ascending order. Empty if there is only one
    /// copy. A tied embedding has several copies. The gradient is summed over the copies. Gradient norms and parameter
    /// counts include only the first copy.
    pub pipeline_copies: Vec<usize>,
    /// Whether the parameter is frozen. A frozen parameter has no gradient, gradient bucket or optimizer state.
    #[serde(default)]
    pub frozen: bool,
}

impl ParameterEntry {
    /// Creates the entry of a parameter that is replicated on every axis of the dense grid. Weight decay applies if the
    /// parameter has two or more dimensions.
    pub fn replicated(path: impl Into<String>, shape: Vec<usize>) -> Self {
        Self {
            path: path.into(),
            grid: Grid::Dense,
            placements: Placements::default(),
            sum_over: Grid::Dense.data_axes(),
            decay: shape.len() > 1,
            hidden: shape.len() > 1,
            stage: 0,
            pipeline_copies: vec![],
            frozen: false,
            shape,
        }
    }

    /// Returns the number of elements of the full parameter.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns whether the parameter has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the shape of the part of the parameter on `rank`.
    pub fn local_shape(&self, rank: &MeshRank) -> Vec<usize> {
        self.placements.local_shape(&self.shape, self.on(rank))
    }

    /// Selects the elements that `rank` holds from `whole`, which contains all elements of the full parameter. Padding
    /// elements are zero.
    pub fn part<T: Copy + Default>(&self, whole: &[T], rank: &MeshRank) -> Vec<T> {
        self.placements.part(&self.shape, whole, self.on(rank))
    }

    /// Assembles the full parameter from the parts of several ranks. Together the ranks must hold the full parameter.
    /// This is the case for all ranks of a group over the [model axes](Grid::model_axes). The elements of a part are in
    /// row-major order.
    pub fn assemble<'a, T: Copy + Default + 'a>(
        &self,
        parts: impl IntoIterator<Item = (MeshRank, &'a [T])>,
    ) -> Vec<T> {
        let grid = self.grid;
        let parts = parts.into_iter().map(|(rank, part)| {
            let on = move |axis| rank.on(grid, axis);
            (on, part)
        });
        self.placements.assemble(&self.shape, parts)
    }

    /// Returns a function that gives the position of `rank` on an axis of the grid.
    pub(super) fn on<'a>(&self, rank: &'a MeshRank) -> impl Fn(Axis) -> AxisRank + use<'a> {
        let grid = self.grid;
        move |axis| rank.on(grid, axis)
    }

    /// Returns whether all ranks of `axis` hold the same part of the parameter.
    pub fn is_replicated_over(&self, axis: Axis) -> bool {
        *self.placements.on(axis) == Placement::Replicated
    }

    /// Returns the axes over which all ranks hold the same part of the parameter. The pipeline axis is not included.
    pub fn replicated_axes(&self) -> AxisSet {
        let split = self.placements.split_axes();
        self.grid.axes().without(Axis::Pipeline).difference(split)
    }

    /// Returns the [model axes](Grid::model_axes) over which all ranks hold the same part of the parameter.
    pub fn replicated_model_axes(&self) -> AxisSet {
        let axes = self.grid.model_axes();
        axes.difference(self.placements.split_axes())
    }

    /// Returns the [model axes](Grid::model_axes) over which the gradient must be summed.
    pub fn summed_model_axes(&self) -> AxisSet {
        self.sum_over.intersection(self.grid.model_axes())
    }

    /// Returns whether several ranks of the pipeline axis hold a copy of the parameter.
    pub fn is_tied(&self) -> bool {
        !self.pipeline_copies.is_empty()
    }

    /// Returns whether `rank` holds the first of the pipeline copies.
    pub fn is_first_copy(&self, rank: &MeshRank) -> bool {
        let own = rank.on(self.grid, Axis::Pipeline).index;
        self.pipeline_copies
            .first()
            .is_none_or(|first| *first == own)
    }

    /// Returns whether gradient norms and parameter counts include the part on `rank`, so that each element is counted
    /// once. The part must belong to the first pipeline copy, and to the first rank of each model axis over which the
    /// parameter is replicated. Sections with fewer parts than ranks are filtered separately by
    /// [`Section::is_first_replica`](super::Section::is_first_replica).
    pub fn counts_on(&self, rank: &MeshRank) -> bool {
        let mut axes = self.replicated_model_axes().iter();
        self.is_first_copy(rank) && axes.all(|axis| rank.on(self.grid, axis).index == 0)
    }

    /// Checks that the entry is consistent and fits the mesh.
    ///
    /// # Errors
    ///
    /// [`TableError::Invalid`] for an invalid split or an invalid `sum_over`. A split is invalid if
    ///
    /// - its axis is not a [model axis](Grid::model_axes) of the grid;
    /// - its dimension does not exist, or another axis splits the same dimension;
    /// - the size of a section, or the number of ranks, is not a multiple of the number of parts.
    ///
    /// `sum_over` must contain the data axes, and must not contain the pipeline axis, axes of the other grid or split
    /// axes.
    pub fn check(&self, mesh: &Mesh) -> Result<(), TableError> {
        let reason = self.split_fault(mesh).or_else(|| self.sum_fault());
        match reason {
            None => Ok(()),
            Some(reason) => Err(TableError::Invalid {
                path: self.path.clone(),
                reason,
            }),
        }
    }

    fn split_fault(&self, mesh: &Mesh) -> Option<String> {
        let (grid, model) = (self.grid, self.grid.model_axes());
        let mut split: Vec<(Axis, usize)> = vec![];
        for (axis, dim, sections) in self.placements.splits() {
            if !model.contains(axis) {
                return Some(format!(
                    "invalid split over {axis}: expected an axis of the {grid} grid that splits \
                     parameters, {model}"
                ));
            }
            let dims = self.shape.len();
            if dim >= dims {
                return Some(format!(
                    "invalid split of dim {dim} over {axis}: the parameter has {dims} dims"
                ));
            }
            if let Some((other, _)) = split.iter().find(|(_, other)| *other == dim) {
                return Some(format!(
                    "invalid split of dim {dim} over both {other} and {axis}: expected a dim for each axis"
                ));
            }
            split.push((axis, dim));
            let ranks = mesh.size(grid, axis);
            for section in sections {
                let (size, parts) = (section.size, section.parts);
                if parts == 0 || !size.is_multiple_of(parts) || !ranks.is_multiple_of(parts) {
                    return Some(format!(
                        "invalid split of {size} elements of dim {dim} into {parts} parts over {axis}: \
                         expected a divisor of {size} and of the {ranks} ranks"
                    ));
                }
            }
            let (found, size) = (
                sections.iter().map(|s| s.size).sum::<usize>(),
                self.shape[dim],
            );
            if found < size {
                return Some(format!(
                    "invalid split of dim {dim} over {axis}: the sections have {found} elements, expected \
                     at least {size}"
                ));
            }
        }
        None
    }

    fn sum_fault(&self) -> Option<String> {
        let (given, data) = (self.sum_over, self.grid.data_axes());
        let allowed = data.union(self.replicated_model_axes());
        let fits = given.intersection(data) == data && given.difference(allowed).is_empty();
        (!fits).then(|| {
            format!(
                "invalid sum over {given}: expected {data} and at most {allowed}, the axes of the {} grid \
                 over which the parameter is replicated",
                self.grid
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use insta::assert_snapshot;
    use proptest::prelude::*;

    use super::*;
    use crate::mesh::ParallelConfig;
    use crate::nn::Section;

    /// Returns the ranks of a world of 8 with two tensor ranks per expert and two expert ranks.
    fn ranks() -> Vec<MeshRank> {
        let config = ParallelConfig::new().with_expert_tensor(2).with_expert(2);
        let mesh = Arc::new(Mesh::new(&config, 8).unwrap());
        (0..8)
            .map(|rank| MeshRank::new(mesh.clone(), rank))
            .collect()
    }

    fn experts(shape: &[usize]) -> ParameterEntry {
        ParameterEntry {
            grid: Grid::Expert,
            sum_over: Grid::Expert.data_axes(),
            ..ParameterEntry::replicated("experts", shape.to_vec())
        }
    }

    fn split(dim: usize, sizes: &[usize], parts: usize) -> Placement {
        let section = |size: &usize| Section { size: *size, parts };
        let sections = sizes.iter().map(section).collect();
        Placement::Split { dim, sections }
    }

    #[test]
    fn two_axes_split_two_dims() {
        let mut entry = experts(&[2, 2, 4]);
        entry.placements = entry
            .placements
            .with(Axis::Expert, Placement::split(0, 2, 2))
            .with(Axis::ExpertTensor, Placement::split(2, 4, 2));
        let whole: Vec<_> = (0..16).collect();
        let ranks = ranks();
        entry.check(ranks[0].mesh()).unwrap();
        // Rank 3 holds the second half of the columns of the second expert.
        assert_eq!(entry.local_shape(&ranks[3]), [1, 2, 2]);
        assert_eq!(entry.part(&whole, &ranks[3]), [10, 11, 14, 15]);
        // The next four ranks hold replicas.
        assert_eq!(entry.part(&whole, &ranks[7]), [10, 11, 14, 15]);
        assert!(ranks.iter().all(|rank| entry.counts_on(rank)));
        assert_eq!(entry.replicated_axes(), AxisSet::of(Axis::Data));
        assert!(entry.replicated_model_axes().is_empty());
    }

    proptest! {
        /// Covers padding, sections, replicas of sections, and replication on one axis.
        #[test]
        fn assembling_undoes_a_split_over_two_axes(
            dims in prop::sample::subsequence(vec![0usize, 1, 2], 2).prop_shuffle(),
            padding in 0usize..3, shared in 1usize..=2, replicated in any::<bool>(),
        ) {
            let mut shape = [3, 2, 5];
            (shape[dims[0]], shape[dims[1]]) = (6 - padding, 8);
            let mut entry = experts(&shape);
            entry.placements = entry.placements.with(Axis::Expert, split(dims[0], &[6], 2));
            if !replicated {
                let Placement::Split { dim, mut sections } = split(dims[1], &[4, 2, 2], 2) else {
                    unreachable!()
                };
                sections[1].parts = shared;
                let placement = Placement::Split { dim, sections };
                entry.placements = entry.placements.with(Axis::ExpertTensor, placement);
            }
            let whole: Vec<usize> = (0..entry.len()).map(|i| i + 1).collect();
            let ranks = &ranks()[4..];
            entry.check(ranks[0].mesh()).unwrap();
            let parts: Vec<_> = ranks.iter().map(|rank| entry.part(&whole, rank)).collect();
            for (rank, part) in ranks.iter().zip(&parts) {
                let len: usize = entry.local_shape(rank).iter().product();
                prop_assert_eq!(part.len(), len);
            }
            let parts = ranks.iter().cloned().zip(parts.iter().map(Vec::as_slice));
            prop_assert_eq!(entry.assemble(parts), whole);
        }
    }

    #[test]
    fn the_first_copy_on_each_replicated_axis_counts() {
        let ranks = ranks();
        let mut entry = experts(&[4]);
        let counting = |entry: &ParameterEntry| {
            let counts = ranks.iter().map(|rank| entry.counts_on(rank));
            counts.map(u8::from).collect::<Vec<_>>()
        };
        // Each rank of the data axis counts its own partition.
        assert_eq!(counting(&entry), [1, 0, 0, 0, 1, 0, 0, 0]);
        entry.placements = (Axis::Expert, Placement::split(0, 4, 2)).into();
        assert_eq!(counting(&entry), [1, 0, 1, 0, 1, 0, 1, 0]);

        let config = ParallelConfig::new().with_pipeline(2);
        let mesh = Arc::new(Mesh::new(&config, 2).unwrap());
        let stages = [0, 1].map(|rank| MeshRank::new(mesh.clone(), rank));
        let mut tied = ParameterEntry::replicated("embedding", vec![4]);
        assert!(!tied.is_tied() && stages.iter().all(|rank| tied.counts_on(rank)));
        tied.pipeline_copies = vec![0, 1];
        assert!(tied.is_tied());
        assert_eq!(
            stages.each_ref().map(|rank| tied.counts_on(rank)),
            [true, false]
        );
    }

    #[test]
    fn a_declaration_that_does_not_fit_says_why() {
        let fault = |change: &dyn Fn(&mut ParameterEntry)| {
            let mut entry = experts(&[4, 6]);
            change(&mut entry);
            entry.check(ranks()[0].mesh()).unwrap_err().to_string()
        };
        let placed = |axis, placement: Placement| {
            fault(&|entry| entry.placements = (axis, placement.clone()).into())
        };
        assert_snapshot!(
            placed(Axis::Tensor, Placement::split(0, 4, 2)),
            @"experts: invalid split over tensor: expected an axis of the expert grid that splits parameters, \
              expert x expert-tensor"
        );
        assert_snapshot!(
            placed(Axis::Expert, Placement::split(2, 4, 2)),
            @"experts: invalid split of dim 2 over expert: the parameter has 2 dims"
        );
        assert_snapshot!(
            placed(Axis::Expert, Placement::split(0, 4, 4)),
            @"experts: invalid split of 4 elements of dim 0 into 4 parts over expert: expected a divisor of 4 and \
              of the 2 ranks"
        );
        assert_snapshot!(
            placed(Axis::Expert, Placement::split(1, 4, 2)),
            @"experts: invalid split of dim 1 over expert: the sections have 4 elements, expected at least 6"
        );
        let twice = fault(&|entry| {
            entry.placements = std::mem::take(&mut entry.placements)
                .with(Axis::Expert, Placement::split(0, 4, 2))
                .with(Axis::ExpertTensor, Placement::split(0, 4, 2));
        });
        assert_snapshot!(
            twice,
            @"experts: invalid split of dim 0 over both expert and expert-tensor: expected a dim for each axis"
        );
        assert_snapshot!(
            fault(&|entry| entry.sum_over = Axis::Expert.into()),
            @"experts: invalid sum over expert: expected data and at most expert x expert-tensor x data, the axes \
              of the expert grid over which the parameter is replicated"
        );
        let split_and_summed = fault(&|entry| {
            entry.placements = (Axis::Expert, Placement::split(0, 4, 2)).into();
            entry.sum_over = entry.sum_over.with(Axis::Expert);
        });
        assert!(
            split_and_summed.contains("at most expert-tensor x data"),
            "{split_and_summed}"
        );
    }
}
