//! The launch parameters of a kernel that processes rows: vector size, number of units and kind of reduction.

use burn::backend::{DispatchDevice, TensorMetadata};
use burn::tensor::{DType, Shape};
use burn_cubecl::{CubeDevice, ops::numeric::empty_device_contiguous_dtype, tensor::CubeTensor};
use cubecl::client::Client;
use cubecl::features::Plane;
use cubecl::prelude::{CubeCount, TensorArg};

/// The method of reductions over the units of a cube: plane operations, or only shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Reduction {
    /// Plane operations first, then one value of each plane through shared memory.
    Planes,
    /// A tree in shared memory.
    Shared,
}

/// The launch parameters of a kernel in which one cube processes one row at a time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowPlan {
    /// The number of elements per load.
    pub vector: usize,
    /// The number of units per cube, a power of two.
    pub units: u32,
    /// The number of vectors per row.
    pub columns: usize,
    /// The method of reductions over the units of a cube.
    pub reduction: Reduction,
}

/// The maximum number of vectors per unit. If a unit would have more vectors, a larger cube is used.
const VECTORS_PER_UNIT: usize = 4;

impl RowPlan {
    /// Creates a plan for contiguous rows of `width` elements of `dtype`.
    ///
    /// Loads are as wide as the device and the width allow. Up to 1024 units share a row, so that each unit has a few
    /// vectors.
    pub(crate) fn new(client: &Client, dtype: DType, width: usize) -> Self {
        let vector = vector(client, dtype, width);
        Self::with_elements_per_unit(client, dtype, width, VECTORS_PER_UNIT * vector)
    }

    /// Creates a plan like [`RowPlan::new`], but with a larger cube if a unit would have more than `most` elements.
    pub(crate) fn with_elements_per_unit(
        client: &Client,
        dtype: DType,
        width: usize,
        most: usize,
    ) -> Self {
        let vector = vector(client, dtype, width);
        let properties = client.properties();
        let columns = width / vector;
        let wanted = columns.div_ceil((most / vector).max(1)).next_power_of_two() as u32;
        // At least one plane, so that plane reductions cover complete planes.
        let least = properties.hardware.plane_size_max.max(32);
        let largest = properties.hardware.max_units_per_cube.min(1024);
        let has_planes = properties.features.plane.contains(Plane::Ops);
        Self {
            vector,
            units: wanted.clamp(least, largest.max(least)),
            columns,
            reduction: reduction(has_planes),
        }
    }

    /// Returns whether sums over the units of a cube use plane operations.
    pub(crate) fn planes(&self) -> bool {
        self.reduction == Reduction::Planes
    }
}

/// Returns the number of elements of the widest load for rows of `width` elements.
fn vector(client: &Client, dtype: DType, width: usize) -> usize {
    let mut sizes = client.io_optimized_vector_sizes(dtype.size());
    sizes.find(|size| width.is_multiple_of(*size)).unwrap_or(1)
}

fn reduction(has_planes: bool) -> Reduction {
    #[cfg(test)]
    if let Some(forced) = FORCED_REDUCTION.get() {
        return forced;
    }
    if has_planes {
        Reduction::Planes
    } else {
        Reduction::Shared
    }
}

#[cfg(test)]
thread_local! {
    static FORCED_REDUCTION: std::cell::Cell<Option<Reduction>> = const { std::cell::Cell::new(None) };
}

/// Runs `work` with `reduction` in every [`RowPlan`] created on this thread.
#[cfg(test)]
pub(crate) fn with_reduction<T>(reduction: Reduction, work: impl FnOnce() -> T) -> T {
    FORCED_REDUCTION.set(Some(reduction));
    let result = work();
    FORCED_REDUCTION.set(None);
    result
}

/// Returns a cube count of at least `cubes`. The cubes are spread over two dimensions if one dimension cannot hold
/// them.
///
/// Kernels use `CUBE_POS` and must ignore positions that are not smaller than `cubes`.
pub(crate) fn grid(client: &Client, cubes: usize) -> CubeCount {
    let most = client.properties().hardware.max_cube_count.0.max(1) as usize;
    if cubes <= most {
        CubeCount::Static(cubes as u32, 1, 1)
    } else {
        // The two dimensions are nearly equal, so that few cubes have no work.
        let high = cubes.div_ceil(most).max((cubes as f64).sqrt() as usize);
        CubeCount::Static(cubes.div_ceil(high) as u32, high as u32, 1)
    }
}

/// Returns the CubeCL device behind a Burn device, or `None` for other devices.
pub(crate) fn cube_device(device: &DispatchDevice) -> Option<&CubeDevice> {
    match device {
        DispatchDevice::Autodiff(device) => cube_device(device),
        DispatchDevice::Cube(device) => Some(device),
        _ => None,
    }
}

/// Returns the rows and columns of a matrix.
pub(crate) fn matrix_sizes(tensor: &CubeTensor) -> [usize; 2] {
    let shape = tensor.meta.shape();
    [shape[0], shape[1]]
}

/// Allocates a contiguous, uninitialized output on the device of `like`.
pub(crate) fn empty(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(
        like.client.clone(),
        like.device.clone(),
        shape.into(),
        dtype,
    )
}

/// Returns an output with the shape and the type of `x`, and the kernel argument for it. The output is `x` itself if no
/// other tensor shares the memory of `x`.
pub(crate) fn output_over(x: &CubeTensor) -> (CubeTensor, TensorArg) {
    // The check must come before a second handle shares the memory.
    if x.can_mut() {
        (x.clone(), x.as_tensor_alias(0))
    } else {
        let output = empty(x, x.shape(), x.dtype);
        (output.clone(), output.into_tensor_arg())
    }
}

/// Uploads numbers to the device of `like`.
pub(crate) fn upload(like: &CubeTensor, numbers: &[i32]) -> CubeTensor {
    let handle = like.client.create_from_slice(bytemuck::cast_slice(numbers));
    let (client, device) = (like.client.clone(), like.device.clone());
    let shape = Shape::from([numbers.len()]);
    CubeTensor::new_contiguous(client, device, shape, handle, DType::I32)
}

/// Returns the tensor itself if no other tensor shares its memory, otherwise a copy.
pub(crate) fn own(tensor: CubeTensor) -> CubeTensor {
    if tensor.can_mut() {
        tensor
    } else {
        tensor.copy()
    }
}
