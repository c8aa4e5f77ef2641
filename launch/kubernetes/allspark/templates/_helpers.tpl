{{- define "allspark.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end }}
{{- end }}

{{- define "allspark.members" -}}{{ include "allspark.name" . }}-members{{- end }}

{{- define "allspark.selector" -}}
app.kubernetes.io/name: allspark
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* The members of the pool: of a group over several pods, the one that serves. */}}
{{- define "allspark.member" -}}
{{ include "allspark.selector" . }}
app.kubernetes.io/component: group
{{- if gt (int .Values.hosts) 1 }}
leaderworkerset.sigs.k8s.io/worker-index: "0"
{{- end }}
{{- end }}

{{- define "allspark.labels" -}}
{{ include "allspark.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "allspark.image" -}}{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{- end }}

{{- define "allspark.scheme" -}}{{ ternary "HTTPS" "HTTP" .Values.tls.enabled }}{{- end }}

{{- define "allspark.tlsSecret" -}}
{{- ternary (printf "%s-tls" (include "allspark.name" .)) .Values.tls.secretName .Values.tls.certManager.enabled }}
{{- end }}

{{/* Who may connect: flags of `allspark serve` and of `allspark http`. */}}
{{- define "allspark.access" -}}
{{- if .Values.auth.secretName }}
- --token-file=/tokens/{{ .Values.auth.key }}
{{- end }}
{{- if .Values.tls.enabled }}
- --tls-cert=/tls/tls.crt
- --tls-key=/tls/tls.key
{{- end }}
{{- if not (and .Values.auth.secretName .Values.tls.enabled) }}
- --insecure
{{- end }}
{{- if .Values.http.openMetrics }}
- --open-metrics
{{- end }}
{{- end }}

{{- define "allspark.accessMounts" -}}
{{- if .Values.auth.secretName }}
- {name: tokens, mountPath: /tokens, readOnly: true}
{{- end }}
{{- if .Values.tls.enabled }}
- {name: tls, mountPath: /tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "allspark.accessVolumes" -}}
{{- if .Values.auth.secretName }}
- name: tokens
  secret: {secretName: {{ .Values.auth.secretName }}, defaultMode: 0440}
{{- end }}
{{- if .Values.tls.enabled }}
- name: tls
  secret: {secretName: {{ include "allspark.tlsSecret" . }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{- define "allspark.podSecurity" -}}
{runAsNonRoot: true, runAsUser: 10001, runAsGroup: 10001, fsGroup: 10001, seccompProfile: {type: RuntimeDefault}}
{{- end }}

{{- define "allspark.security" -}}
{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
{{- end }}

{{/* Metadata of a group's pods, without the chart's version: an upgrade would restart them. The labels of the pool name
the engine whose metrics the endpoint picker should expect. */}}
{{- define "allspark.groupMetadata" -}}
labels:
  {{- include "allspark.selector" . | nindent 2 }}
  app.kubernetes.io/component: group
  {{- if .Values.inferencePool.enabled }}
  llm-d.ai/engine-type: vllm
  inference.networking.k8s.io/engine-type: vllm
  {{- end }}
  {{- with .Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .Values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "allspark.resources" -}}
{{- $resources := deepCopy .Values.resources }}
{{- if .Values.gpus }}
{{- $_ := set $resources "limits" (merge (dict .Values.gpuResource (int .Values.gpus)) ($resources.limits | default dict)) }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{/* A pod of a group: all of the spec but its containers. Its volumes come last: those that serve add secrets to them. */}}
{{- define "allspark.groupPod" -}}
# The time that running requests get to end, also in a rolling update.
terminationGracePeriodSeconds: {{ add .Values.drainLimit .Values.drainDelay 25 }}
automountServiceAccountToken: false
securityContext: {{ include "allspark.podSecurity" . }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .Values.affinity }}
affinity:
  {{- toYaml .Values.affinity | nindent 2 }}
{{- else if .Values.spread }}
affinity:
  podAntiAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "allspark.selector" . | nindent 12 }}
            app.kubernetes.io/component: group
{{- end }}
volumes:
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ .Values.sharedMemory }}}
  - name: tmp
    emptyDir: {}
  {{- if .Values.model.volume }}
  - name: models
    {{- toYaml .Values.model.volume | nindent 4 }}
  {{- else if .Values.model.hostPath }}
  - name: models
    hostPath: {path: {{ .Values.model.hostPath }}, type: Directory}
  {{- end }}
  {{- if gt (int .Values.hosts) 1 }}
  - name: ssh
    secret:
      secretName: {{ required "ssh.secretName: a group over several hosts needs a secret with id_ed25519 and authorized_keys" .Values.ssh.secretName }}
      defaultMode: 0440
  {{- end }}
  {{- with .Values.volumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* Everybody may write to an emptyDir, and rename what others have there. The group gets a directory of its own. */}}
{{- define "allspark.sharedMemory" -}}
- name: shm
  image: {{ include "allspark.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [mkdir, -p, -m, "0700", /shm/own]
  securityContext: {{ include "allspark.security" . }}
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 64Mi}
  volumeMounts:
    - {name: shm, mountPath: /shm}
{{- end }}

{{- define "allspark.groupMounts" -}}
- {name: shm, mountPath: /dev/shm, subPath: own}
- {name: tmp, mountPath: /tmp}
{{- if or .Values.model.volume .Values.model.hostPath }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if gt (int .Values.hosts) 1 }}
- {name: ssh, mountPath: /ssh, readOnly: true}
{{- end }}
{{- with .Values.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The container that serves. */}}
{{- define "allspark.groupContainer" -}}
- name: group
  image: {{ include "allspark.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args:
    - --model={{ .Values.model.path }}
    {{- with .Values.model.name }}
    - --model-name={{ . }}
    {{- end }}
    - --address=0.0.0.0:50051
    - --http=0.0.0.0:8000
    - --http-workers={{ .Values.http.workers }}
    {{- include "allspark.access" . | trim | nindent 4 }}
    - --drain-limit={{ .Values.drainLimit }}
    {{- if .Values.gpus }}
    - --gpus={{ range $i := until (int .Values.gpus) }}{{ if $i }},{{ end }}{{ $i }}{{ end }}
    {{- end }}
    {{- if gt (int .Values.hosts) 1 }}
    - --hosts=auto
    # Both sides have the same key, which proves the host, too: a pod that comes again under its name is known.
    - --remote-shell=ssh -p 2222 -i /ssh/id_ed25519 -o BatchMode=yes -o ConnectTimeout=5 -o UserKnownHostsFile=/tmp/known_hosts
    {{- end }}
    {{- with .Values.args }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  env:
    - {name: HOME, value: /tmp}       # what is measured of CPUs and GPUs, and compiled for them, is kept below it
    {{- with .Values.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - {name: grpc, containerPort: 50051}
    - {name: http, containerPort: 8000}
  resources:
    {{- include "allspark.resources" . | nindent 4 }}
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL]{{ if .Values.bindMemory }}, add: [SYS_NICE]{{ end }}}
  # Kubernetes takes a pod out of its services while it sends SIGTERM: without a pause, requests that come in between
  # would be refused.
  lifecycle:
    preStop: {exec: {command: [sleep, {{ .Values.drainDelay | quote }}]}}
  startupProbe:
    httpGet: {path: /health/ready, port: http, scheme: {{ include "allspark.scheme" . }}}
    periodSeconds: 5
    failureThreshold: {{ div (add .Values.loadLimit 4) 5 }}
  # A pod that drains, or whose group starts again, is not ready.
  readinessProbe:
    httpGet: {path: /health/ready, port: http, scheme: {{ include "allspark.scheme" . }}}
    periodSeconds: 5
  # The supervisor restarts a failed group, and the container ends if it cannot. Kubernetes restarts a container only if
  # the HTTP server does not answer at all, which is not so while a group drains or loads.
  livenessProbe:
    httpGet: {path: /health/live, port: http, scheme: {{ include "allspark.scheme" . }}}
    periodSeconds: 20
    timeoutSeconds: 5
    failureThreshold: 6
  volumeMounts:
    {{- include "allspark.groupMounts" . | trim | nindent 4 }}
    {{- include "allspark.accessMounts" . | trim | nindent 4 }}
{{- end }}
