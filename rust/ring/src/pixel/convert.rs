//! One kind of conversion, prepared once and run on many pictures.

#[cfg(target_arch = "x86_64")]
use super::avx2;
use super::colour::{Coefficients, NEUTRAL, SAMPLE_BITS};
use super::filter::Filter;
use super::line::Rows;
use super::picture::{Layout, Picture};
use super::turn::{Crop, Rotation, rotate, unrotate};
use super::{Colour, Kernels, MAX_SIDE, scalar, vector_available};
use crate::error::{Result, argument};

/// Samples past the end of a line that vector kernels may read or write.
const SLACK: usize = 32;

/// Everything about one kind of conversion that does not depend on the pixels; made once, used for many pictures.
#[derive(Debug, Clone)]
pub struct Converter {
    layout: Layout,
    coefficients: Coefficients,
    rotation: Rotation,
    /// Crop in stored (unrotated) pixels.
    crop: Crop,
    /// Output size before rotation: height, width.
    size: (usize, usize),
    filters: Option<[Filter; 4]>,
    vector: bool,
}

/// Lines in use while converting; reuse saves the allocation.
#[derive(Debug, Default)]
pub struct Scratch {
    column: Vec<i16>,
    y: Vec<i16>,
    u: Vec<i16>,
    v: Vec<i16>,
    turned: Vec<u8>,
}

impl Converter {
    /// Prepares a conversion to `size` = (height, width) of the displayed picture.
    pub fn new(
        layout: Layout,
        colour: Colour,
        rotation: Rotation,
        crop: Option<Crop>,
        size: Option<(usize, usize)>,
        kernels: Kernels,
    ) -> Result<Self> {
        let (shown_h, shown_w) = if rotation.swaps() {
            (layout.width, layout.height)
        } else {
            (layout.height, layout.width)
        };
        let crop = crop.unwrap_or(Crop {
            top: 0,
            left: 0,
            height: shown_h,
            width: shown_w,
        });
        let fits = |first: usize, length: usize, limit: usize| {
            length > 0 && first.checked_add(length).is_some_and(|end| end <= limit)
        };
        if !fits(crop.top, crop.height, shown_h) || !fits(crop.left, crop.width, shown_w) {
            return Err(argument(
                "crop",
                format!(
                    "{} rows from {} and {} columns from {}",
                    crop.height, crop.top, crop.width, crop.left
                ),
                format!("a part of the displayed {shown_h} x {shown_w} picture"),
            ));
        }
        let (out_h, out_w) = size.unwrap_or((crop.height, crop.width));
        if out_h == 0 || out_w == 0 || out_h > MAX_SIDE || out_w > MAX_SIDE {
            return Err(argument(
                "size",
                format!("{out_h} x {out_w}"),
                format!("1 to {MAX_SIDE} pixels a side"),
            ));
        }
        let stored = unrotate(crop, rotation, shown_h, shown_w);
        let size = if rotation.swaps() {
            (out_w, out_h)
        } else {
            (out_h, out_w)
        };
        let resized = size != (stored.height, stored.width);
        // Grey pictures have no limited range in practice: FFmpeg's scaler treats them as full range too.
        let full = colour.full_range || !layout.has_chroma;
        Ok(Self {
            layout,
            coefficients: Coefficients::new(colour.matrix, full, layout.depth),
            rotation,
            crop: stored,
            size,
            filters: resized.then(|| filters(layout, stored, size)),
            vector: kernels == Kernels::Auto && vector_available() && layout.depth <= SAMPLE_BITS,
        })
    }

    /// Layout of the pictures this conversion was made for.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Output size of the displayed picture: height, width.
    #[must_use]
    pub fn output_size(&self) -> (usize, usize) {
        if self.rotation.swaps() {
            (self.size.1, self.size.0)
        } else {
            self.size
        }
    }

    /// Bytes of an output picture.
    #[must_use]
    pub fn output_bytes(&self) -> usize {
        self.size.0 * self.size.1 * 3
    }

    /// Converts one picture into `out`, rows of RGB without gaps.
    pub fn run(&self, picture: &Picture<'_>, out: &mut [u8], scratch: &mut Scratch) -> Result<()> {
        if picture.layout != self.layout {
            return Err(argument(
                "picture",
                format!("{:?}", picture.layout),
                format!("{:?}, which this conversion was made for", self.layout),
            ));
        }
        if out.len() != self.output_bytes() {
            return Err(argument(
                "output",
                format!("{} bytes", out.len()),
                self.output_bytes().to_string(),
            ));
        }
        if self.rotation == Rotation::None {
            self.upright(picture, out, scratch);
        } else {
            let mut turned = std::mem::take(&mut scratch.turned);
            turned.resize(self.output_bytes(), 0);
            self.upright(picture, &mut turned, scratch);
            rotate(&turned, self.size, self.rotation, out);
            scratch.turned = turned;
        }
        Ok(())
    }

    fn upright(&self, picture: &Picture<'_>, out: &mut [u8], scratch: &mut Scratch) {
        let (_, width) = self.size;
        let grey = NEUTRAL;
        for line in [&mut scratch.y, &mut scratch.u, &mut scratch.v] {
            line.resize(width + SLACK, grey);
        }
        if !self.layout.has_chroma {
            scratch.u.fill(grey);
            scratch.v.fill(grey);
        }
        let taps = self
            .filters
            .as_ref()
            .map_or(0, |f| f[1].taps.max(f[3].taps));
        scratch.column.resize(self.layout.width + SLACK + taps, 0);
        for (y, row) in out.chunks_exact_mut(width * 3).enumerate() {
            match &self.filters {
                None => {
                    if self.copy_row_at_once(picture, y, scratch, row) {
                        continue;
                    }
                    self.copy_row(picture, y, scratch);
                }
                Some(filters) => self.resample_row(picture, filters, y, scratch),
            }
            self.colour_row(scratch, row);
        }
    }

    /// 8-bit rows without a resize: luma goes from the picture to the output without a line in between.
    fn copy_row_at_once(
        &self,
        picture: &Picture<'_>,
        y: usize,
        s: &mut Scratch,
        out: &mut [u8],
    ) -> bool {
        #[cfg(target_arch = "x86_64")]
        if self.vector && self.layout.depth == 8 {
            let (row, left, width) = (self.crop.top + y, self.crop.left, self.crop.width);
            let Some(luma) = &picture.planes[0] else {
                return false;
            };
            let whole = width / avx2::BLOCK * avx2::BLOCK;
            self.copy_chroma(picture, y, s);
            let source = &luma.row(row)[left..left + width];
            luma.expand(row, left + whole, 0, &mut s.y[whole..width]);
            // SAFETY: `vector` is set only where AVX2 was detected.
            unsafe {
                avx2::colour_of_bytes(
                    source,
                    &s.u,
                    &s.v,
                    &self.coefficients,
                    &mut out[..3 * whole],
                );
            }
            let tail = whole..width;
            scalar::colour(
                &s.y[tail.clone()],
                &s.u[tail.clone()],
                &s.v[tail],
                &self.coefficients,
                &mut out[3 * whole..],
            );
            return true;
        }
        false
    }

    fn copy_row(&self, picture: &Picture<'_>, y: usize, s: &mut Scratch) {
        let (row, left, width) = (self.crop.top + y, self.crop.left, self.crop.width);
        if let Some(luma) = &picture.planes[0] {
            luma.expand(row, left, 0, &mut s.y[..width]);
        }
        self.copy_chroma(picture, y, s);
    }

    fn copy_chroma(&self, picture: &Picture<'_>, y: usize, s: &mut Scratch) {
        let (row, left, width) = (self.crop.top + y, self.crop.left, self.crop.width);
        let (sx, sy) = (self.layout.shift_x, self.layout.shift_y);
        let fresh = y == 0 || sy == 0 || row.is_multiple_of(2);
        if let (true, Some(u), Some(v)) = (fresh, &picture.planes[1], &picture.planes[2]) {
            #[cfg(target_arch = "x86_64")]
            if self.vector && self.layout.depth == 8 && sx == 1 && left.is_multiple_of(2) {
                // SAFETY: `vector` is set only where AVX2 was detected.
                unsafe {
                    avx2::expand_pairs(&u.row(row >> sy)[left / 2..], &mut s.u[..width]);
                    avx2::expand_pairs(&v.row(row >> sy)[left / 2..], &mut s.v[..width]);
                }
                return;
            }
            u.expand(row >> sy, left, sx, &mut s.u[..width]);
            v.expand(row >> sy, left, sx, &mut s.v[..width]);
        }
    }

    fn resample_row(
        &self,
        picture: &Picture<'_>,
        filters: &[Filter; 4],
        y: usize,
        s: &mut Scratch,
    ) {
        let [rows_y, cols_y, rows_c, cols_c] = filters;
        let width = self.size.1;
        if let Some(luma) = &picture.planes[0] {
            self.resample(luma, rows_y, cols_y, y, &mut s.column, &mut s.y[..width]);
        }
        if let (Some(u), Some(v)) = (&picture.planes[1], &picture.planes[2]) {
            self.resample(u, rows_c, cols_c, y, &mut s.column, &mut s.u[..width]);
            self.resample(v, rows_c, cols_c, y, &mut s.column, &mut s.v[..width]);
        }
    }

    fn resample(
        &self,
        plane: &Rows<'_>,
        rows: &Filter,
        columns: &Filter,
        y: usize,
        column: &mut [i16],
        out: &mut [i16],
    ) {
        let first = rows.starts[y];
        let weights = rows.row(y);
        let weights = &weights[..weights.len().min(plane.height - first)];
        let from = columns.starts.first().copied().unwrap_or(0);
        let to = columns
            .starts
            .last()
            .map_or(0, |s| s + columns.used)
            .min(plane.width);
        #[cfg(target_arch = "x86_64")]
        if self.vector {
            // SAFETY: `vector` is set only where AVX2 was detected.
            unsafe {
                avx2::vertical(plane, first, weights, from, to, column);
                avx2::horizontal(column, columns, out);
            }
            return;
        }
        scalar::vertical(plane, first, weights, from, to, column);
        scalar::horizontal(column, columns, out);
    }

    fn colour_row(&self, s: &Scratch, row: &mut [u8]) {
        #[cfg(target_arch = "x86_64")]
        if self.vector {
            // SAFETY: `vector` is set only where AVX2 was detected.
            unsafe { avx2::colour(&s.y, &s.u, &s.v, &self.coefficients, row) };
            return;
        }
        scalar::colour(&s.y, &s.u, &s.v, &self.coefficients, row);
    }
}

fn filters(layout: Layout, crop: Crop, size: (usize, usize)) -> [Filter; 4] {
    let axis = |first: usize, length: usize, limit: usize, shift: u32, outputs: usize| {
        let unit = f64::from(1_u32 << shift);
        Filter::new(
            first as f64 / unit,
            length as f64 / unit,
            limit.div_ceil(1 << shift),
            outputs,
        )
    };
    let (h, w) = size;
    [
        axis(crop.top, crop.height, layout.height, 0, h),
        axis(crop.left, crop.width, layout.width, 0, w),
        axis(crop.top, crop.height, layout.height, layout.shift_y, h),
        axis(crop.left, crop.width, layout.width, layout.shift_x, w),
    ]
}
