//! The device, through CUDA's driver.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{
    self, CUdevice_attribute, CUevent, CUevent_flags, CUpointer_attribute, CUresult, CUstream,
    CUstream_flags, CUstreamCaptureMode,
};

use super::super::driver::{Allocation, DeviceDriver, Event, Priority, Stream};

/// A device in its primary context, which CubeCL uses too.
#[derive(Debug)]
pub(super) struct CudaDeviceDriver {
    context: Arc<CudaContext>,
    index: usize,
}

impl CudaDeviceDriver {
    /// The device `index`.
    ///
    /// # Errors
    /// If there is no driver, or the driver's error.
    pub fn new(index: usize) -> Result<Arc<Self>, String> {
        // SAFETY: loads the driver, which has no harmful side effects.
        if !unsafe { sys::is_culib_present() } {
            return Err("the CUDA driver libcuda.so.1 was not found".into());
        }
        let context = CudaContext::new(index).map_err(|error| format!("{error:?}"))?;
        Ok(Arc::new(Self { context, index }))
    }

    /// The context of the device.
    pub fn context(&self) -> sys::CUcontext {
        self.context.cu_ctx()
    }
}

fn check(name: &str, result: CUresult) -> Result<(), String> {
    result
        .result()
        .map_err(|error| format!("{name}: {error:?}"))
}

/// Logs an error that cannot be handled: a handle or some memory is lost.
fn warn_on_error(name: &str, result: CUresult) {
    if let Err(reason) = check(name, result) {
        tracing::warn!("{reason}");
    }
}

fn stream_of(stream: Stream) -> CUstream {
    stream.0 as CUstream
}

fn event_of(event: Event) -> CUevent {
    event.0 as CUevent
}

// In all of these, streams and events are alive: the callers own them.
impl DeviceDriver for CudaDeviceDriver {
    fn name(&self) -> String {
        format!("cuda:{}", self.index)
    }

    fn make_current(&self) -> Result<(), String> {
        let bound = self.context.bind_to_thread();
        bound.map_err(|error| format!("{error:?}"))
    }

    fn ignore_captures(&self) -> Result<(), String> {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the mode before is written before the call returns.
        check("cuThreadExchangeStreamCaptureMode", unsafe {
            sys::cuThreadExchangeStreamCaptureMode(&mut mode)
        })
    }

    fn multiprocessors(&self) -> Result<usize, String> {
        let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let count = self.context.attribute(attribute);
        count
            .map(|count| count as usize)
            .map_err(|error| format!("cuDeviceGetAttribute: {error:?}"))
    }

    fn create_stream(&self, priority: Priority) -> Result<Stream, String> {
        // The greatest priority has the least number.
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the numbers are written before the call returns.
        check("cuCtxGetStreamPriorityRange", unsafe {
            sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest)
        })?;
        let priority = match priority {
            Priority::Normal => least,
            Priority::High => greatest,
        };
        let mut stream = std::ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the stream is written before the call returns.
        check("cuStreamCreateWithPriority", unsafe {
            sys::cuStreamCreateWithPriority(&mut stream, flags, priority)
        })?;
        Ok(Stream(stream as usize))
    }

    fn destroy_stream(&self, stream: Stream) {
        // SAFETY: as above; pending work on it is executed first.
        warn_on_error("cuStreamDestroy", unsafe {
            sys::cuStreamDestroy_v2(stream_of(stream))
        });
    }

    fn create_event(&self) -> Result<Event, String> {
        let mut event = std::ptr::null_mut();
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the event is written before the call returns.
        check("cuEventCreate", unsafe {
            sys::cuEventCreate(&mut event, flags)
        })?;
        Ok(Event(event as usize))
    }

    fn destroy_event(&self, event: Event) {
        // SAFETY: as above; pending waits for it are still released.
        warn_on_error("cuEventDestroy", unsafe {
            sys::cuEventDestroy_v2(event_of(event))
        });
    }

    fn record(&self, event: Event, stream: Stream) -> Result<(), String> {
        // SAFETY: as above.
        check("cuEventRecord", unsafe {
            sys::cuEventRecord(event_of(event), stream_of(stream))
        })
    }

    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<(), String> {
        // SAFETY: as above.
        check("cuStreamWaitEvent", unsafe {
            sys::cuStreamWaitEvent(stream_of(stream), event_of(event), 0)
        })
    }

    fn query_event(&self, event: Event) -> Result<bool, String> {
        // SAFETY: as above.
        match unsafe { sys::cuEventQuery(event_of(event)) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("cuEventQuery", result).map(|()| true),
        }
    }

    fn allocate(&self, bytes: usize, stream: Stream) -> Result<u64, String> {
        let mut address = 0;
        // SAFETY: the address is written before the call returns. A stream-ordered allocation does not wait for the
        // device, as `cuMemAlloc` may: that would wait for collectives too.
        check("cuMemAllocAsync", unsafe {
            sys::cuMemAllocAsync(&mut address, bytes, stream_of(stream))
        })?;
        Ok(address)
    }

    fn allocation(&self, address: u64) -> Result<Allocation, String> {
        let (mut start, mut bytes, mut id) = (0, 0, 0u64);
        // SAFETY: the results are written before the calls return; the attribute has 8 bytes.
        unsafe {
            check(
                "cuMemGetAddressRange",
                sys::cuMemGetAddressRange_v2(&mut start, &mut bytes, address),
            )?;
            let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID;
            check(
                "cuPointerGetAttribute",
                sys::cuPointerGetAttribute((&raw mut id).cast(), attribute, address),
            )?;
        }
        Ok(Allocation {
            address: start,
            bytes,
            id,
        })
    }

    fn free(&self, address: u64, stream: Stream) {
        // SAFETY: of `allocate`, and freed once.
        warn_on_error("cuMemFreeAsync", unsafe {
            sys::cuMemFreeAsync(address, stream_of(stream))
        });
    }

    unsafe fn copy_to_device(&self, to: u64, from: &[u8], stream: Stream) -> Result<(), String> {
        let from_ = from.as_ptr().cast::<c_void>();
        // SAFETY: required of the caller.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, from_, from.len(), stream_of(stream))
        })?;
        // Whether pageable memory has been read when the call returns depends on its size.
        // SAFETY: as above.
        check("cuStreamSynchronize", unsafe {
            sys::cuStreamSynchronize(stream_of(stream))
        })
    }

    unsafe fn copy_to_host(&self, to: &mut [u8], from: u64, stream: Stream) -> Result<(), String> {
        let to_ = to.as_mut_ptr().cast::<c_void>();
        // SAFETY: required of the caller.
        check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(to_, from, to.len(), stream_of(stream))
        })?;
        // SAFETY: as above.
        check("cuStreamSynchronize", unsafe {
            sys::cuStreamSynchronize(stream_of(stream))
        })
    }

    unsafe fn copy_on_device(
        &self,
        to: u64,
        from: u64,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), String> {
        // SAFETY: required of the caller.
        check("cuMemcpyDtoDAsync", unsafe {
            sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream_of(stream))
        })
    }
}
