//! The specification with which a layer creates and declares a parameter.

#[cfg(doc)]
use super::ParameterEntry;
use super::{Init, Placement, Placements};
use crate::mesh::{Axis, AxisSet, Grid};

/// The specification of a parameter, from which [`ModelBuilder::parameter`](super::ModelBuilder::parameter) creates it.
///
/// ```
/// use burn::module::{Module, Param};
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron::nn::{Init, ParameterSpec, Placement};
/// use burn_megatron::prelude::*;
///
/// #[derive(Module, Debug)]
/// struct Gain {
///     weight: Param<Tensor<1>>,
/// }
///
/// let layout = ParallelConfig::new().with_tensor(2);
/// let shapes = World::threads(2)?.run(|rank| {
///     let groups = ParallelContext::new(&layout, &rank)?;
///     let builder = ModelBuilder::new(&groups, &Device::flex());
///     let placement = Placement::split(0, 6, builder.place().size);
///     let spec = ParameterSpec::new([6], Init::Constant(1.0)).with_placement(Axis::Tensor, placement);
///     let weight = builder.parameter("weight", spec);
///     let model = builder.finish(Gain { weight })?;
///     Ok::<_, AnyError>((model.module.weight.val().dims(), model.table.entries()[0].shape.clone()))
/// })?;
/// assert_eq!(shapes[0], ([3], vec![6]));
/// # Ok::<(), AnyError>(())
/// ```
#[derive(Clone, Debug)]
pub struct ParameterSpec<const D: usize> {
    /// The shape of the full parameter.
    pub shape: [usize; D],
    /// The grid on whose axes the parameter is placed. See [`ParameterEntry::grid`].
    pub grid: Grid,
    /// The placement of the parameter on the axes of the grid. See [`ParameterEntry::placements`].
    pub placements: Placements,
    /// The initializer of the parameter.
    pub init: Init,
    /// The axes over which the gradient must be summed, in addition to the data axes of the grid. See
    /// [`ParameterEntry::sum_over`].
    pub sum_over: AxisSet,
    /// Whether weight decay applies to the parameter. See [`ParameterEntry::decay`].
    pub decay: bool,
    /// Whether the parameter is a matrix of a hidden layer. See [`ParameterEntry::hidden`].
    pub hidden: bool,
}

impl<const D: usize> ParameterSpec<D> {
    /// Creates the specification of a parameter that is replicated on the dense grid. Weight decay applies if the
    /// parameter has two or more dimensions.
    pub fn new(shape: [usize; D], init: Init) -> Self {
        Self {
            shape,
            grid: Grid::Dense,
            placements: Placements::default(),
            init,
            sum_over: AxisSet::EMPTY,
            decay: D > 1,
            hidden: D > 1,
        }
    }

    /// Declares that the parameter is not a matrix of a hidden layer. Use this method for embeddings and output
    /// weights.
    pub fn not_hidden(mut self) -> Self {
        self.hidden = false;
        self
    }

    /// Sets the grid. The weights of experts use the expert grid.
    pub fn in_grid(mut self, grid: Grid) -> Self {
        self.grid = grid;
        self
    }

    /// Sets the placement of the parameter on an axis of the grid.
    pub fn with_placement(mut self, axis: Axis, placement: Placement) -> Self {
        self.placements = self.placements.with(axis, placement);
        self
    }

    /// Adds axes over which the gradient is summed, in addition to the data axes of the grid. `None` adds no axes.
    pub fn with_sum_over(mut self, axes: impl Into<AxisSet>) -> Self {
        self.sum_over = self.sum_over.union(axes.into());
        self
    }
}
