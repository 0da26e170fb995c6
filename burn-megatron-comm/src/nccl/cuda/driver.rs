//! The device, through CUDA's driver.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUresult, CUstream, CUstream_flags};

use super::super::driver::{Driver, Event, Stream};

/// A device in its primary context, which CubeCL works in too.
#[derive(Debug)]
pub(super) struct CudaDriver {
    context: Arc<CudaContext>,
    index: usize,
}

impl CudaDriver {
    /// The device `index`.
    ///
    /// # Errors
    /// That there is no driver, or what it says.
    pub fn new(index: usize) -> Result<Arc<Self>, String> {
        // SAFETY: opens the driver, which does nothing harmful when it is opened.
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

fn told(name: &str, result: CUresult) -> Result<(), String> {
    result
        .result()
        .map_err(|error| format!("{name}: {error:?}"))
}

/// For what cannot be helped: a handle or some memory is lost.
fn told_in_vain(name: &str, result: CUresult) {
    if let Err(reason) = told(name, result) {
        tracing::warn!("{reason}");
    }
}

fn stream_of(stream: Stream) -> CUstream {
    stream.0 as CUstream
}

fn event_of(event: Event) -> CUevent {
    event.0 as CUevent
}

// In all of these, streams and events are alive: whoever asks holds them.
impl Driver for CudaDriver {
    fn name(&self) -> String {
        format!("cuda:{}", self.index)
    }

    fn enter(&self) -> Result<(), String> {
        let bound = self.context.bind_to_thread();
        bound.map_err(|error| format!("{error:?}"))
    }

    fn stream(&self) -> Result<Stream, String> {
        let mut stream = std::ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the stream is written at once.
        told("cuStreamCreate", unsafe {
            sys::cuStreamCreate(&mut stream, flags)
        })?;
        Ok(Stream(stream as usize))
    }

    fn close(&self, stream: Stream) {
        // SAFETY: as above; what is still on it ends first.
        told_in_vain("cuStreamDestroy", unsafe {
            sys::cuStreamDestroy_v2(stream_of(stream))
        });
    }

    fn event(&self) -> Result<Event, String> {
        let mut event = std::ptr::null_mut();
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the event is written at once.
        told("cuEventCreate", unsafe {
            sys::cuEventCreate(&mut event, flags)
        })?;
        Ok(Event(event as usize))
    }

    fn destroy(&self, event: Event) {
        // SAFETY: as above; who waits for it on the device still gets it.
        told_in_vain("cuEventDestroy", unsafe {
            sys::cuEventDestroy_v2(event_of(event))
        });
    }

    fn record(&self, event: Event, stream: Stream) -> Result<(), String> {
        // SAFETY: as above.
        told("cuEventRecord", unsafe {
            sys::cuEventRecord(event_of(event), stream_of(stream))
        })
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<(), String> {
        // SAFETY: as above.
        told("cuStreamWaitEvent", unsafe {
            sys::cuStreamWaitEvent(stream_of(stream), event_of(event), 0)
        })
    }

    fn passed(&self, event: Event) -> Result<bool, String> {
        // SAFETY: as above.
        match unsafe { sys::cuEventQuery(event_of(event)) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => told("cuEventQuery", result).map(|()| true),
        }
    }

    fn allocate(&self, bytes: usize, stream: Stream) -> Result<u64, String> {
        let mut address = 0;
        // SAFETY: the address is written at once. An allocation of this kind does not wait for the device,
        // as another one may: that would wait for collectives too.
        told("cuMemAllocAsync", unsafe {
            sys::cuMemAllocAsync(&mut address, bytes, stream_of(stream))
        })?;
        Ok(address)
    }

    fn free(&self, address: u64, stream: Stream) {
        // SAFETY: of `allocate`, and freed once.
        told_in_vain("cuMemFreeAsync", unsafe {
            sys::cuMemFreeAsync(address, stream_of(stream))
        });
    }

    unsafe fn to_device(&self, to: u64, from: &[u8], stream: Stream) -> Result<(), String> {
        let from_ = from.as_ptr().cast::<c_void>();
        // SAFETY: as of this function.
        told("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, from_, from.len(), stream_of(stream))
        })?;
        // Whether ordinary memory has been read when the call returns depends on its size.
        // SAFETY: as above.
        told("cuStreamSynchronize", unsafe {
            sys::cuStreamSynchronize(stream_of(stream))
        })
    }

    unsafe fn to_host(&self, to: &mut [u8], from: u64, stream: Stream) -> Result<(), String> {
        let to_ = to.as_mut_ptr().cast::<c_void>();
        // SAFETY: as of this function.
        told("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(to_, from, to.len(), stream_of(stream))
        })?;
        // SAFETY: as above.
        told("cuStreamSynchronize", unsafe {
            sys::cuStreamSynchronize(stream_of(stream))
        })
    }

    unsafe fn copy(&self, to: u64, from: u64, bytes: usize, stream: Stream) -> Result<(), String> {
        // SAFETY: as of this function.
        told("cuMemcpyDtoDAsync", unsafe {
            sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream_of(stream))
        })
    }
}
