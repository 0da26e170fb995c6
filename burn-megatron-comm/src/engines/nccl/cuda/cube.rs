//! Access to the memory of a tensor and to the stream that computes the tensor. This is the only module of the crate
//! that uses internals of CubeCL and of Burn's fusion.
//!
//! CubeCL does not document these internals. The code is valid for the CubeCL version that the workspace pins.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::backend::{Cube, DispatchDevice};
use burn::tensor::{Device, Tensor};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeDevice, kernel::into_contiguous};
use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::future;
use cubecl::server::{BufferBinding, Handle};
use cubecl_common::device::Device as _;
use cubecl_common::device_handle::DeviceHandle;
use cubecl_server::runtime::Runtime;
use cubecl_server::server::ServerStorage;
use cubecl_server::stream::WriteScoped;

use super::super::driver::Stream;
use super::super::library::Addresses;
use crate::world::from_panic;

type Server = <CudaRuntime as Runtime>::Server;
type Primitive = <Cube as burn::backend::BackendTypes>::FloatTensorPrimitive;

/// Returns the index of a CUDA device, or `None` for any other device.
pub(super) fn cuda_index(device: &Device) -> Option<usize> {
    match device.as_dispatch() {
        DispatchDevice::Cube(CubeDevice::Cuda(device)) => Some(device.index),
        _ => None,
    }
}

/// An input tensor, and an output tensor of the same type whose contents are not set.
pub(super) struct TensorPair {
    pub input: CubeTensor,
    pub output: CubeTensor,
    fusion: FusionClient,
}

/// A client that converts a primitive tensor back into a fusion tensor.
#[cfg(not(feature = "fusion"))]
struct FusionClient;

#[cfg(feature = "fusion")]
struct FusionClient(
    burn::backend::fusion::client::GlobalFusionClient<burn_cubecl::fusion::FusionCubeRuntime>,
);

impl TensorPair {
    /// Creates a pair of tensors: `input`, made contiguous, and an output with `output` elements of the type of
    /// `input`.
    ///
    /// With fusion, this method submits the operations that compute `input` to the device. Therefore, the calls of all
    /// ranks are in the order of the ranks' programs, regardless of the fused operations.
    pub fn new(input: Tensor<1>, output: usize) -> Result<Self, String> {
        let primitive = input
            .try_into_primitive::<Cube>()
            .map_err(|error| format!("the tensor is on another backend: {error:?}"))?;
        let (input, fusion) = resolve_fusion(primitive);
        let input = into_contiguous(input);
        let (client, device) = (input.client.clone(), input.device.clone());
        let output = empty_device_contiguous_dtype(client, device, [output].into(), input.dtype);
        Ok(Self {
            input,
            output,
            fusion,
        })
    }

    /// Converts the output into a tensor.
    pub fn into_output(self) -> Tensor<1> {
        Tensor::from_primitive::<Cube>(register_fusion(self.output, self.fusion))
    }

    /// Returns the memory of the input and of the output. For a tensor without elements, the memory is `None`.
    pub fn handles(&self) -> [Option<Handle>; 2] {
        [&self.input, &self.output].map(|tensor| {
            let some = tensor.meta.shape().num_elements() > 0;
            some.then(|| tensor.handle.clone())
        })
    }
}

#[cfg(not(feature = "fusion"))]
fn resolve_fusion(primitive: Primitive) -> (CubeTensor, FusionClient) {
    (primitive, FusionClient)
}

#[cfg(not(feature = "fusion"))]
fn register_fusion(tensor: CubeTensor, _fusion: FusionClient) -> Primitive {
    tensor
}

#[cfg(feature = "fusion")]
fn resolve_fusion(primitive: Primitive) -> (CubeTensor, FusionClient) {
    let client = primitive.client.clone();
    let tensor = client.resolve_tensor_float::<burn_cubecl::CubeBackend>(primitive);
    (tensor, FusionClient(client))
}

/// Registers a fusion operation without inputs that returns the tensor.
#[cfg(feature = "fusion")]
fn register_fusion(tensor: CubeTensor, FusionClient(client): FusionClient) -> Primitive {
    use burn::backend::fusion::custom::{
        CustomOpIr, HandleContainer, OperationFn, OperationIr, StreamId, TensorIr,
    };

    let (shape, id) = (tensor.meta.shape().clone(), client.create_empty_handle());
    let result = TensorIr::uninit(id, shape, tensor.dtype);
    let description = CustomOpIr {
        id: "collective".into(),
        inputs: vec![],
        outputs: vec![result.clone()],
        scalars: vec![],
    };
    let give = OperationFn(move |handles: &mut HandleContainer<_>| {
        handles.register_float_tensor::<burn_cubecl::CubeBackend>(&result.id, tensor.clone());
        Ok(())
    });
    let operation = OperationIr::Custom(description);
    let mut given = client.register(StreamId::current(), operation, give);
    given.remove(0)
}

/// The addresses of the memory, with a value that keeps the memory alive.
pub(super) type HeldAddresses = (Addresses, Box<dyn Any + Send>);

/// A submitter of work to the thread of a device.
#[derive(Clone, Debug)]
pub(super) struct Submitter(CudaDevice);

impl Submitter {
    pub fn of(index: usize) -> Self {
        Self(CudaDevice { index })
    }

    fn handle(&self) -> DeviceHandle<Server> {
        DeviceHandle::new(self.0.to_id())
    }

    /// Calls `then` with the memory of `handles` and with the stream that computes them. The call is ordered after the
    /// work that this thread has submitted earlier. Does not wait for the call.
    pub fn resolve(
        &self,
        handles: [Option<Handle>; 2],
        then: impl FnOnce(Result<(HeldAddresses, Stream), String>) + Send + 'static,
    ) {
        let bindings = handles.map(|handle| handle.map(Handle::binding));
        let device = self.handle();
        device.submit(move |server: &mut Server| then(caught(|| found(server, &bindings))));
        // Submissions are batched until more arrive, but a rank that waits for its peers submits no more work.
        device.flush_queue();
    }

    /// Calls `then` with the stream of the pair's output and the stream of this thread. The call is ordered with the
    /// work that this thread submits. Does not wait for the call.
    pub fn streams(
        &self,
        pair: &TensorPair,
        then: impl FnOnce(Result<[Stream; 2], String>) + Send + 'static,
    ) {
        let bindings = on_streams(pair);
        self.handle().submit(move |server: &mut Server| {
            then(caught(|| streams_of(server, &bindings)));
        });
    }

    /// Checks that the streams of a pair can be determined.
    pub fn try_streams(&self, pair: &TensorPair) -> Result<(), String> {
        let bindings = on_streams(pair);
        let found = self
            .handle()
            .submit_blocking(move |server: &mut Server| streams_of(server, &bindings));
        found.map_err(|error| format!("{error:?}"))?.map(drop)
    }

    /// Same as [`resolve`](Self::resolve), but uses CubeCL's documented interface. Waits until all work that this
    /// thread has submitted is on the device, and does not return a stream.
    pub fn fetch(pair: &TensorPair) -> Result<HeldAddresses, String> {
        let mut addresses = [0; 2];
        let mut held: Vec<Box<dyn Any + Send>> = vec![];
        for (address, handle) in addresses.iter_mut().zip(pair.handles()) {
            let Some(handle) = handle else { continue };
            let resource = pair.input.client.get_resource::<Server>(handle);
            let resource = resource.map_err(|error| format!("{error:?}"))?;
            *address = resource.resource().ptr;
            held.push(Box::new(resource));
        }
        Ok((addresses, Box::new(held)))
    }

    /// Waits until the device has executed all work that this thread has submitted.
    pub fn sync(pair: &TensorPair) -> Result<(), String> {
        let synced = future::block_on(pair.input.client.sync());
        synced.map_err(|error| format!("{error:?}"))
    }
}

/// Runs `find` and converts a panic into an error. Without this conversion, CubeCL would only log a panic on this
/// thread, and the call would wait for its memory until its timeout.
fn caught<T>(find: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    let panicked = |payload| Err(from_panic(payload).to_string());
    catch_unwind(AssertUnwindSafe(find)).unwrap_or_else(panicked)
}

/// Returns the memory of the output, and some memory that was created on the stream of this thread.
fn on_streams(pair: &TensorPair) -> [BufferBinding; 2] {
    let current = pair.output.client.empty(1);
    [pair.output.handle.clone(), current].map(Handle::binding)
}

fn streams_of(server: &mut Server, bindings: &[BufferBinding; 2]) -> Result<[Stream; 2], String> {
    let [output, current] = bindings;
    let own = stream_of(server, output, &[output])?;
    Ok([own, stream_of(server, current, &[current])?])
}

fn found(
    server: &mut Server,
    bindings: &[Option<BufferBinding>; 2],
) -> Result<(HeldAddresses, Stream), String> {
    let all: Vec<_> = bindings.iter().flatten().collect();
    let Some(last) = all.last() else {
        return Err("there is no memory".into());
    };
    let mut addresses = [0; 2];
    let mut held: Vec<Box<dyn Any + Send>> = vec![];
    for (address, binding) in addresses.iter_mut().zip(bindings) {
        let Some(binding) = binding else { continue };
        let resource = server.get_resource(binding.clone(), last.stream);
        let resource = resource.map_err(|error| format!("{error:?}"))?;
        *address = resource.resource().ptr;
        held.push(Box::new(resource));
    }
    let stream = stream_of(server, last, &all)?;
    Ok(((addresses, Box::new(held)), stream))
}

/// Returns the stream on which the memory was created. This stream waits for the other streams that use `bindings`.
fn stream_of(
    server: &mut Server,
    of: &BufferBinding,
    bindings: &[&BufferBinding],
) -> Result<Stream, String> {
    let streams = server.write_streams();
    let mut streams = streams
        .resolve(of.stream, bindings.iter().copied())
        .map_err(|error| format!("{error:?}"))?;
    Ok(Stream(streams.current().sys as usize))
}
