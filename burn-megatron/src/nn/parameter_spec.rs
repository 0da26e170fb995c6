//! The declaration of a parameter by the layer that creates it.

#[cfg(doc)]
use super::ParameterEntry;
use super::{Init, Placement, Placements};
use crate::mesh::{Axis, AxisSet, Grid};

/// The specification of a parameter.
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
    /// See [`ParameterEntry::grid`].
    pub grid: Grid,
    /// See [`ParameterEntry::placements`].
    pub placements: Placements,
    /// The initial values of the parameter.
    pub init: Init,
    /// The axes of [`ParameterEntry::sum_over`] in addition to the data axes of the grid.
    pub sum_over: AxisSet,
    /// See [`ParameterEntry::decay`].
    pub decay: bool,
    /// See [`ParameterEntry::hidden`].
    pub hidden: bool,
}

impl<const D: usize> ParameterSpec<D> {
    /// Creates a replicated parameter of the dense grid. Weight decay applies if it has two or more dimensions.
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

    /// Declares that the parameter is not a matrix of a hidden layer, such as an embedding or an output weight.
    pub fn not_hidden(mut self) -> Self {
        self.hidden = false;
        self
    }

    /// Sets the grid, for the weights of experts.
    pub fn in_grid(mut self, grid: Grid) -> Self {
        self.grid = grid;
        self
    }

    /// Sets the placement on an axis of the grid.
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
