//! Emits a kernel as CUDA C++, as CubeCL does on a device.

use std::sync::Arc;

use burn_megatron_kernels::aot::{AotInstance, AotTarget};
use cubecl::ir::features::{Features, Plane, Tma, TypeUsage};
use cubecl::ir::{
    ContiguousElements, DeviceIdentity, DeviceProperties, ElemType, FloatKind, HardwareProperties,
    MemoryDeviceProperties, MmaProperties, OpaqueType, TargetProperties, VectorSize,
};
use cubecl::prelude::cmma::MatrixLayout;
use cubecl::profile::TimingMethod;
use cubecl::{Compiler, define_kernel};
use cubecl_cpp::cuda::arch::CudaArchitecture;
use cubecl_cpp::cuda::mma::{CudaCmmaCompiler, manual::contiguous_elements_cuda};
use cubecl_cpp::cuda::{supported_mma_combinations, supported_scaled_mma_combinations};
use cubecl_cpp::shared::{
    CompilationOptions, CppCompiler, CppSupportedFeatures, register_mma_features,
    register_scaled_mma_features, register_wmma_features,
};
use cubecl_cpp::{register_supported_types, target::Cuda};

use crate::arch::Arch;

/// A kernel in CUDA C++.
#[derive(Clone, Debug)]
pub struct Source {
    /// The source text.
    pub text: String,
    /// Bytes of dynamic shared memory. The launch adds them to the static shared memory of the source.
    pub shared: usize,
    /// Units per cube.
    pub units: u32,
}

/// Expands a kernel and compiles it to CUDA C++. Errors come from CubeCL.
pub fn emit(instance: &AotInstance, arch: Arch) -> Result<Source, String> {
    let definition =
        define_kernel(&*instance.kernel).map_err(|error| format!("CubeCL: {error:?}"))?;
    let units = definition.settings.cube_dim.num_elems();
    let kernel = CppCompiler::<Cuda>::default()
        .compile(definition, &options(arch))
        .map_err(|error| format!("CubeCL: {error:?}"))?;
    Ok(Source {
        text: kernel.to_string(),
        shared: kernel.shared_memory_size,
        units,
    })
}

/// Returns the target of an architecture, with the properties that CubeCL's CUDA runtime reads from a device.
pub fn target(arch: Arch) -> AotTarget {
    AotTarget {
        device: Arc::new(device(arch)),
        compiler: Arc::new(TargetProperties {
            mma: MmaProperties {
                register_size_bits: 32,
                const_plane_size: 32,
                register_layout_a: MatrixLayout::RowMajor,
                register_layout_b: MatrixLayout::ColMajor,
                register_layout_acc: MatrixLayout::RowMajor,
                register_duplication_a: 1,
                register_duplication_b: 1,
                register_duplication_acc: 1,
                contiguous_elements: ContiguousElements::new(contiguous_elements_cuda),
            },
        }),
    }
}

fn options(arch: Arch) -> CompilationOptions {
    let hopper = arch.version >= 90;
    CompilationOptions {
        warp_size: 32,
        supports_features: CppSupportedFeatures {
            grid_constants: true,
            clusters: hopper,
            fast_math: true,
            fast_tanh: true,
            elect_sync: hopper,
            dp4a: true,
        },
        ..CompilationOptions::default()
    }
}

fn device(arch: Arch) -> DeviceProperties {
    let memory: u64 = 80 << 30;
    let mut device = DeviceProperties::new(
        Features::default(),
        MemoryDeviceProperties::new(memory / 4, 512).with_max_memory(memory),
        hardware(arch),
        TimingMethod::Device,
        DeviceIdentity {
            name: arch.name.into(),
            fingerprint: format!("ptx_sm{}", arch.version),
            physical: None,
        },
    );
    register_supported_types(&mut device);
    device.register_opaque_type(OpaqueType::Barrier);
    let tf32 = ElemType::Float(FloatKind::TF32);
    device.register_type_usage(tf32, TypeUsage::Conversion);
    let halves = [FloatKind::F16, FloatKind::BF16].map(ElemType::Float);
    let features = &mut device.features;
    features.matmul.ldmatrix.extend(halves);
    features.copy_async = true;
    features.memory_reinterpret = true;
    features.alignment = true;
    features.device_memory_scope = true;
    features.plane |= Plane::Ops | Plane::Sync | Plane::NonUniformControlFlow;
    if arch.version >= 90 {
        features.matmul.stmatrix.extend(halves);
        features.tma.insert(Tma::Base);
        features.cube_cluster = true;
        device.register_opaque_type(OpaqueType::TensorMap);
    }
    register_products(&mut device, arch);
    device
}

/// Registers the matrix products of the tensor cores.
fn register_products(device: &mut DeviceProperties, arch: Arch) {
    let arch = CudaArchitecture {
        version: arch.version,
        tensor_cores: true,
    };
    register_wmma_features(
        CudaCmmaCompiler::Cpp.supported_cmma_combinations(&arch),
        device,
    );
    register_mma_features(supported_mma_combinations(&arch), device);
    register_scaled_mma_features(supported_scaled_mma_combinations(&arch), device);
}

fn hardware(arch: Arch) -> HardwareProperties {
    HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: arch.shared_memory,
        max_cube_count: (i32::MAX as u32, 65535, 65535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: Some(arch.multiprocessors),
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        num_cpu_cores: None,
        last_level_cache_size: None,
        max_vector_size: VectorSize::MAX,
        cube_mma_reserved_shared_memory: 0,
    }
}
