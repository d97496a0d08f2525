// Parse arguments as sd-cli does, with stable-diffusion.cpp's parser and without its library.
// In a checkout of stable-diffusion.cpp, no submodules needed:
//     g++ -std=c++17 -Iinclude -Ithirdparty -Iexamples/common .../sd_cpp_parser.cpp examples/common/common.cpp
#include <cstdarg>

#include "common.h"

// what the parser needs of the library: names in help texts, values of options that no line has
#define STAND_IN(symbol)                               \
    extern "C" const char* stand_in_##symbol() asm(#symbol); \
    const char* stand_in_##symbol() { return ""; }
STAND_IN(sd_cache_params_init)
STAND_IN(sd_commit)
STAND_IN(sd_ctx_params_init)
STAND_IN(sd_get_num_physical_cores)
STAND_IN(sd_img_gen_params_init)
STAND_IN(sd_list_devices)
STAND_IN(sd_lora_apply_mode_name)
STAND_IN(sd_prediction_name)
STAND_IN(sd_rng_type_name)
STAND_IN(sd_sample_method_name)
STAND_IN(sd_sample_params_init)
STAND_IN(sd_sample_params_to_str)
STAND_IN(sd_scheduler_name)
STAND_IN(sd_type_name)
STAND_IN(sd_version)
STAND_IN(sd_vid_gen_params_init)
STAND_IN(str_to_lora_apply_mode)
STAND_IN(str_to_prediction)
STAND_IN(str_to_rng_type)
STAND_IN(str_to_sample_method)
STAND_IN(str_to_scheduler)
STAND_IN(str_to_sd_hires_upscaler)
STAND_IN(str_to_sd_type)
#define TEN_NAMES "", "", "", "", "", "", "", "", "", ""
const char* sample_method_to_str[] = {TEN_NAMES, TEN_NAMES, TEN_NAMES, TEN_NAMES};
const char* scheduler_to_str[] = {TEN_NAMES, TEN_NAMES, TEN_NAMES, TEN_NAMES};
std::string sd_basename(const std::string& path) { return path; }
uint8_t* load_image_from_memory(const char*, int, int&, int&, int, int, int) { return nullptr; }
void example_log_printf(sd_log_level_t, const char*, int, const char* format, ...) {
    va_list values;
    va_start(values, format);
    vfprintf(stderr, format, values);
    va_end(values);
}

int main(int count, const char** words) {
    SDContextParams context;
    SDGenerationParams generation;
    std::vector<ArgOptions> options = {context.get_options(), generation.get_options()};
    return parse_options(count, words, options) && context.resolve_and_validate(IMG_GEN) ? 0 : 1;
}
